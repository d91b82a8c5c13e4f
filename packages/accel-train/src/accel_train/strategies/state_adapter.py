"""How the state of a strategy's models and optimizers is saved and loaded.

`StateAdapter` is for models and optimizers of plain PyTorch, also with `DTensor`s. A strategy whose engine keeps them
in another form names a subclass of it as `Strategy.adapter`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.format.memory import copy_from_file, own_memory
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.modules.names import listed, loads_by_itself, misfits, prefixed_modules, under_own_names
from accel_ckpt.modules.versions import versions_of, with_versions
from accel_ckpt.parts import Part, is_divided, is_leaf, shape_of
from accel_ckpt.tensor_storage import why_not_plain
from accel_train.errors import PrepareError
from accel_train.state_part import StatePart
from accel_train.strategies.whole_parameters import whole_parameters
from accel_train.strategies.window_gradients import WindowGradients

__all__ = [
    "Adapted",
    "SavedModel",
    "StateAdapter",
    "full_state_dict",
    "leaf_misfits",
]


class SavedModel(Protocol):
    """The saved weights of one model, by canonical name."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The state dict without values: shape and dtype of tensors; other entries as they are."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole state dict; tensors may be views of files."""
        ...

    def check(self, targets: Mapping[str, Any]) -> None:
        """Check that `fill` can fill these tensors, and the files that this rank reads for it; changes nothing."""
        ...

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Fill tensors, `DTensor`s and `accel_ckpt.Part`s in place with this rank's part of the saved values."""
        ...


class _Options(Protocol):
    @property
    def device(self) -> torch.device: ...


class _Precision(Protocol):
    def values_changed(self, model: nn.Module) -> None: ...


class Adapted(Protocol):
    """The attributes of a strategy that its adapter uses."""

    name: ClassVar[str]

    @property
    def options(self) -> _Options:
        """Has the device of this rank."""
        ...

    @property
    def precision(self) -> _Precision:
        """The precision, which is notified when values of models change by other means than an optimizer's step."""
        ...

    def plain(self, model: nn.Module) -> nn.Module:
        """The script's own module inside a prepared one."""
        ...


class StateAdapter:
    """Saves and loads the states of prepared models and optimizers, under the names of the script's own model.

    The leaves of a state are whole tensors, `DTensor`s, `accel_ckpt.Part`s, or lists of the parts of one tensor. Each
    rank returns the parts that it holds. The state of the leading rank (0, or the first of each node) must list all
    tensors; those that it does not hold, as `Part.nothing(shape, dtype)`. A tensor that only another rank lists makes
    the save fail.

    Attributes:
        strategy: whose models and optimizers these are.
        gradients: where those of an open accumulation window are.
    """

    #: The class of `gradients`.
    window_gradients: ClassVar[type[WindowGradients]] = WindowGradients
    #: What tensors in `rank_state` are, as messages call them.
    rank_tensors: ClassVar[str] = "tensors of an engine"

    def __init__(self, strategy: Adapted) -> None:
        self.strategy = strategy
        self.gradients = self.window_gradients(strategy)

    # Models

    def keeps_replicas(self, model: nn.Module) -> bool:
        """Whether all ranks hold the same values of all parameters of a prepared model.

        Ranks then share the writing, are compared for drift, and the main process may save alone. The same holds for
        the states of optimizers that step only such models, unless `optimizer_state` has parts.
        """
        return False

    def model_state(self, model: nn.Module, named: NamedModel | None = None) -> dict[str, Any]:
        """This rank's part of a prepared model's state, by canonical name: tensors, `DTensor`s or `accel_ckpt.Part`s.

        Args:
            model: the prepared model.
            named: its module with its canonical names.
        """
        return (named or NamedModel(self.strategy.plain(model))).state_dict()

    def frozen(self, named: NamedModel) -> set[str]:
        """The names of a model's frozen parameters, also of those that other ranks hold. Collective."""
        return {name for name, parameter in named.parameters().items() if not parameter.requires_grad}

    def parameters_elsewhere(self, model: nn.Module) -> dict[str, Part]:
        """Parameters of a prepared model that only other ranks hold, as empty parts; this rank's are in the module.

        Raises:
            PrepareError: an engine holds the parameters in parts of its own.
        """
        if self._in_parts(model):
            raise PrepareError(
                f"The engine of the strategy {self.strategy.name!r} holds the parameters of "
                f"{type(self.strategy.plain(model)).__name__} in parts of its own, which AveragedWeights cannot "
                "average. Train with ddp, fsdp2 or pp."
            )
        return {}

    def _in_parts(self, model: nn.Module) -> bool:
        held = self.model_state(model).values()
        return any(is_divided(leaf) and not isinstance(leaf, Tensor) for leaf in held)

    def is_divided(self, model: nn.Module) -> bool:
        """Whether this rank holds only a part of a prepared model."""
        return any(is_divided(leaf) for leaf in self.model_state(model).values())

    def exported_state(self, model: nn.Module) -> dict[str, Any]:
        """The state for files of weights alone, like `model_state`, in the dtype for other programs."""
        return self.model_state(model)

    def misfits(self, model: nn.Module, weights: SavedModel, strict: bool) -> list[str]:
        """The reasons why saved weights cannot be loaded into a prepared model; reads and checks the files.

        Raises:
            CorruptCheckpointError: a file is not what was written.
        """
        if not self.is_divided(model):
            return misfits(self.strategy.plain(model), weights.whole(), strict)
        return leaf_misfits(self.model_state(model), weights, strict)

    def load_model_state(self, model: nn.Module, weights: SavedModel, strict: bool) -> None:
        """Load weights for which `misfits` found nothing; each rank reads its part."""
        plain = self.strategy.plain(model)
        if not self.is_divided(model):
            _load_whole(plain, weights.whole(), strict)
            return
        own, about = self.model_state(model), weights.about
        if any(loads_by_itself(child) for child in plain.modules()):
            _load_translated(plain, own, weights, strict)
            return
        weights.fill({name: leaf for name, leaf in own.items() if is_leaf(leaf) and name in about})
        extra = {name: about[name] for name, leaf in own.items() if not is_leaf(leaf) and name in about}
        if extra:
            plain.load_state_dict(under_own_names(plain, extra), strict=False)

    @contextmanager
    def whole_parameters(self, model: nn.Module, *, write_back: bool) -> Iterator[None]:
        """Context in which every rank has the whole parameters of a prepared model, and can call it alone. Collective.

        Args:
            model: the prepared model.
            write_back: at the end, keep rank 0's values on all ranks; False: drop changes to divided parameters.

        Raises:
            PrepareError: an engine holds parts that are not `DTensor`s.
        """
        plain = self.strategy.plain(model)
        if self._in_parts(model):
            raise PrepareError(
                f"The engine of the strategy {self.strategy.name!r} holds the parameters of {type(plain).__name__} in "
                "parts of its own, so whole_parameters() cannot put whole ones in their place. Read them with "
                "get_state_dict(), and write them with save_state() and load_state()."
            )
        with whole_parameters(model, plain, self.strategy.options.device, write_back=write_back):
            yield
        if write_back:
            self.strategy.precision.values_changed(plain)

    # Optimizers; all take the script's optimizer, without wrapper, as `Strategy.prepare` returned it

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
        """The parameters of each group as the script made it; an engine may have emptied or changed the groups."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """An optimizer's state by parameter name; leaves as in `model_state`.

        Calls `optimizer.state_dict()`. An optimizer that refuses this, or returns something else, needs an override.
        """
        return accel_ckpt.optimizer_state_by_name(optimizer, models)

    def check_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Check that `load_optimizer_state` can load a state; changes nothing.

        Raises:
            StateMismatchError: the state is of other parameters, groups or classes.
            CorruptCheckpointError: a file that this rank reads is not what was written.
        """
        accel_ckpt.check_optimizer_state(optimizer, tree, models)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Load what `optimizer_state` returned, and `check_optimizer_state` has checked.

        Whole tensors are divided like the current ones.
        """
        accel_ckpt.load_optimizer_state(optimizer, tree, models, checked=True)

    # What a rank has of its own

    def parts(self, optimizers: Sequence[Any], named: Sequence[NamedModel]) -> list[StatePart]:
        """Further kinds of state of the strategy, restored before optimizers.

        Args:
            optimizers: the prepared optimizers, with their wrappers.
            named: the prepared models with their canonical names.
        """
        return []

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """What only this rank has of a model, to continue between two micro-batches: plain data and tensors.

        Raises:
            AccelError: a state cannot be saved now.
        """
        return {}

    def rank_state_misfit(self, model: nn.Module, state: Mapping[str, Any]) -> str | None:
        """Why a `rank_state` of another run cannot be loaded; None: it can."""
        return None

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what `rank_state` returned; empty if a state has none for this rank: begin from the start."""


def full_state_dict(states: StateAdapter, model: nn.Module) -> dict[str, Any]:
    """A model's whole weights under canonical names, as plain tensors; a collective if ranks hold parts.

    Tensors of which ranks hold parts are gathered to host memory, one after the other.
    """
    state = states.exported_state(model)
    whole = {
        name: accel_ckpt.gather_whole(leaf) if is_divided(leaf) else leaf for name, leaf in state.items()
    }
    return with_versions(whole, versions_of(state))


def _load_translated(model: nn.Module, own: Mapping[str, Any], weights: SavedModel, strict: bool) -> None:
    """Load weights that modules translate, from tensors divided as those are that their state dict gives."""
    about = weights.about
    state = {
        name: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in own.items()
        if name in about
    }
    weights.fill({name: leaf for name, leaf in state.items() if is_leaf(leaf)})
    state |= {name: value for name, value in about.items() if not is_leaf(state.get(name))}
    state = with_versions(state, versions_of(about))
    model.load_state_dict(under_own_names(model, state), strict=strict)


def _load_whole(model: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    """Load a whole state dict by canonical name.

    What modules save but do not load, as 4-bit layers their format, is filled in place. torch's ``load_state_dict``
    goes through all names once per module, so a model whose modules only copy is filled without it.
    """
    own = None if any(map(loads_by_itself, model.modules())) else _own_tensors(model)
    if own is not None and own.keys() == weights.keys():
        for name, value in weights.items():
            copy_from_file(own[name], value)
        return
    state = under_own_names(model, weights)
    formats = {name for name in state if getattr(_parameter_of(model, name), "quant_state", None) is not None}
    loaded = {
        name: own_memory(value) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if name not in formats
    }
    model.load_state_dict(with_versions(loaded, versions_of(state)), strict=strict)
    kept = model.state_dict() if formats else {}
    for name in formats & kept.keys():
        copy_from_file(kept[name], state[name])


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The tensors that loading a state dict fills, by canonical name; ``None`` if there are more than plain tensors."""
    found: dict[str, torch.Tensor] = {}
    for _, canonical, module in prefixed_modules(model):
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None or leaf in module._non_persistent_buffers_set:
                    continue
                if tensor.is_meta or why_not_plain(tensor) is not None:
                    return None
                found[canonical + leaf] = tensor
    return found


def _parameter_of(model: nn.Module, name: str) -> Any:
    """The parameter that an entry of a state dict below a parameter's name describes."""
    module: Any = model
    parts = name.split(".")
    for place, part in enumerate(parts):
        parameter = module._parameters.get(part)
        if parameter is not None:
            return parameter if place + 1 < len(parts) else None
        module = module._modules.get(part)
        if module is None:
            return None
    return None


def leaf_misfits(
    own: Mapping[str, Any], weights: SavedModel, strict: bool, aliases: Collection[str] = ()
) -> list[str]:
    """The reasons why saved weights do not fit a rank's state; if they fit, reads and checks the files.

    Args:
        own: the state that `StateAdapter.model_state` returns.
        weights: the saved weights.
        strict: whether both must have the same names.
        aliases: names in `own` of tensors that `weights` has under another name.

    Raises:
        CorruptCheckpointError: a file is not what was written.
    """
    about = weights.about
    shapes = [
        f"{name} is {list(about[name].shape)} there and {list(shape_of(leaf))} here"
        for name, leaf in own.items()
        if is_leaf(leaf) and name in about and tuple(about[name].shape) != tuple(shape_of(leaf))
    ]
    problems = [listed(shapes)] if shapes else []
    if strict:
        missing, unknown = own.keys() - about.keys() - set(aliases), about.keys() - own.keys()
        for where, names in (("there", missing), ("here", unknown)):
            problems += [f"not {where}: {listed(sorted(names))}"] if names else []
    if not problems:
        weights.check({name: leaf for name, leaf in own.items() if is_leaf(leaf) and name in about})
    return problems
