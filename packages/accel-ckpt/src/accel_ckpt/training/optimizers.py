"""Optimizer states keyed by the names of parameters, so that they do not depend on the order of parameters.

A parameter is called ``model_<i>.<canonical name>`` after its model. A parameter of no given model is called
``unnamed.<group>.<position>`` after its place in the optimizer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.errors import CheckpointError, StateMismatchError
from accel_ckpt.format.forms import OTHERS, check_form
from accel_ckpt.format.saved_tensors import SavedTensor
from accel_ckpt.modules.named_model import NamedModel, named_models
from accel_ckpt.modules.names import listed
from accel_ckpt.parts import Leaf, is_sharded
from accel_ckpt.tensor_storage import why_not_plain
from accel_ckpt.training.low_bit_states import pack_low_bit, unpack_low_bit
from accel_ckpt.training.tree_fill import Like, TreeFill

__all__ = [
    "KERNEL_OPTIONS",
    "OWN_KEYS",
    "check_optimizer_state",
    "load_optimizer_state",
    "name_positions",
    "names_to_find",
    "optimizer_state_by_name",
    "steps_only",
]


# States of torch's own optimizers that have the shape of their parameter. Fused kernels count the elements of the
# parameter and write to that number of elements of its states, without asking whether these have them.
_LIKE_PARAMETER = frozenset({
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_avg_sqs", "exp_inf", "grad_avg", "max_exp_avg_sq",
    "momentum_buffer", "prev", "square_avg", "step_size", "sum",
})  # fmt: skip
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})
# States that an optimizer makes when it is built, not in its first step.
_MADE_AT_ONCE = {"Adagrad": ("step", "sum")}


def _names(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


OWN_KEYS = frozenset({"state", "param_groups", "global_state", "class"})
"""Entries of an optimizer's state by parameter name that its state dict lacks, or has in another form."""
KERNEL_OPTIONS = ("foreach", "fused")
"""Options that only choose how a step is computed on this device and for these parameters, divided or not."""
FORM = {"state": {OTHERS: object}, "param_groups": [{"params": [_names]}]}
"""The form of an optimizer's state by parameter name."""


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
) -> dict[str, Any]:
    """Return the state of an optimizer keyed by parameter name, not by position.

    Args:
        optimizer: any optimizer with torch's ``state_dict()``.
        models: modules or ``NamedModel``, in the order in which they are saved; the first model that has a parameter
            names it, by its first name there.

    Returns:
        ``{"state": {name: …}, "param_groups": [{"params": [name, …], …}], …}``, sharing tensors with the
        optimizer. Other entries of its ``state_dict()`` keep their keys; state under keys that are not parameters is
        under ``"global_state"``.
    """
    tree = name_positions(_state_dict(optimizer), _groups(optimizer), models)
    kind = _torch_class(optimizer)
    return tree if kind is None else tree | {"class": kind}


def name_positions(
    packed: Mapping[str, Any],
    parameters: Sequence[Sequence[Tensor]],
    models: Sequence[nn.Module | NamedModel],
) -> dict[str, Any]:
    """Convert a state dict of torch's optimizers, which numbers parameters, to parameter names.

    Args:
        packed: the state dict of an optimizer with the same groups of parameters in the same order.
        parameters: the parameters of each group.
        models: the models that name them.

    Raises:
        StateMismatchError: the state dict has other groups, or groups of other sizes.
    """
    names = _parameter_names(parameters, models)
    packed = dict(packed)
    state = packed.pop("state")
    groups = packed.pop("param_groups")
    here, there = [len(group) for group in names], [len(group["params"]) for group in groups]
    if here != there:
        raise StateMismatchError(
            f"the saved optimizer has groups of {there} parameters, but this one has groups of {here}. Build the "
            "optimizer as it was when the checkpoint was saved"
        )
    by_position = {position: name for name, position in _positions(names, groups).items()}
    tree: dict[str, Any] = {
        "state": {
            by_position[key]: pack_low_bit(value) if isinstance(value, Mapping) else value
            for key, value in state.items()
            if key in by_position
        },
        "param_groups": [
            {**group, "params": [by_position[position] for position in group["params"]]} for group in groups
        ],
        **packed,
    }
    if rest := {key: value for key, value in state.items() if key not in by_position}:
        tree["global_state"] = rest
    return tree


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, whose own error has nothing to do with a checkpoint."""
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() failed, so its state can be neither saved nor compared with a "
            f"saved one: {error}"
        ) from error


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], models: Sequence[nn.Module | NamedModel]
) -> None:
    """Check that ``load_optimizer_state`` can load a state; changes nothing.

    Raises:
        CorruptCheckpointError: a file that this rank reads was damaged or changed after the save.
        StateMismatchError: parameters are missing, unexpected or grouped differently, or the optimizer was of another
            class.
    """
    names = _parameter_names(_groups(optimizer), models)
    _check(optimizer, tree, names)
    _state_fill(optimizer, tree, names, _state_dict(optimizer)).check()


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    models: Sequence[nn.Module | NamedModel],
    *,
    checked: bool = False,
) -> None:
    """Load a state that ``optimizer_state_by_name`` returned into an optimizer.

    The order of groups, and of parameters in a group, does not matter; the parameters of each group must be the same.
    Tensors go to the device and dtype of their parameter as torch's ``load_state_dict`` decides. States of a parameter
    that is divided among ranks (`DTensor`) are divided like it. ``fused`` and ``foreach`` stay as the script set them.

    Args:
        optimizer: changed in place; so are its states, if they have the saved shape and dtype.
        tree: the state, with tensors, which are copied; or with ``SavedTensor`` from
            ``TrainingCheckpoint.lazy_shared``, of which this rank reads only its part.
        models: the models as they were at the save.
        checked: ``check_optimizer_state`` found no fault in this state for this optimizer.

    Raises:
        StateMismatchError: parameters are missing, unexpected or grouped differently; nothing was changed.
        CorruptCheckpointError: a file was damaged or changed after the save; nothing was changed.
    """
    names = _parameter_names(_groups(optimizer), models)
    if not checked:
        _check(optimizer, tree, names)
    current = _state_dict(optimizer)
    fill = _state_fill(optimizer, tree, names, current)
    saved: defaultdict[frozenset[str], list[Any]] = defaultdict(list)
    for group in tree["param_groups"]:
        saved[frozenset(group["params"])].append(group)  # several only of groups without parameters
    groups = [
        # The state may lack a group that is frozen here.
        (saved[frozenset(group_names)].pop(0) if group_names or not group["params"] else group)
        | {key: group[key] for key in KERNEL_OPTIONS if key in group}
        | {"params": list(group["params"])}
        for group_names, group in zip(_to_find(optimizer, names, tree), current["param_groups"], strict=True)
    ]
    rest = {key: value for key, value in tree.items() if key not in OWN_KEYS}
    with torch.no_grad():
        parts = {"state": fill.run()}
        parts |= TreeFill({**rest, "param_groups": groups}, {}, lambda saved, here, path: None).run()
    parts["state"] = {number: unpack_low_bit(value) for number, value in parts["state"].items()}
    optimizer.load_state_dict(parts)


def _to_find(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], tree: Mapping[str, Any]
) -> list[list[str]]:
    """Names of the parameters of each group that a state must list."""
    trained = [[parameter.requires_grad for parameter in group] for group in _groups(optimizer)]
    return names_to_find(names, trained, tree["param_groups"])


def _check(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Sequence[Sequence[str]]) -> None:
    """Compare a state with an optimizer, but for the content of files.

    Raises:
        StateMismatchError: as `check_optimizer_state`.
    """
    check_form(tree, FORM, "the saved optimizer")
    _check_parameters(_to_find(optimizer, names, tree), names, tree["param_groups"])
    # Versions of torch add switches, but not numbers, to the options of an optimizer.
    defaults = getattr(optimizer, "defaults", {})
    numbers = {name for name, value in defaults.items() if not isinstance(value, bool | None)}
    if lacking := sorted({name for group in tree["param_groups"] for name in numbers - set(group)}):
        raise StateMismatchError(
            f"the saved optimizer has no {', '.join(lacking)}, which {type(optimizer).__name__} needs: it was of "
            "another class. Build the optimizer as it was when the checkpoint was saved"
        )
    here, there = _torch_class(optimizer), tree.get("class")
    check_form(there, (None, str), "the saved optimizer's class")
    if None not in (here, there) and here != there:
        raise StateMismatchError(
            f"the saved optimizer is {str(there)[:80]}, and this one is {here}, which computes with other states and "
            "options. Build the optimizer as it was when the checkpoint was saved, or begin with a new state"
        )
    known = {name for group in names for name in group}
    if unknown := sorted(set(tree["state"]) - known):
        raise StateMismatchError(
            f"the saved optimizer holds state for {listed(unknown)}, which are not in any of its groups"
        )
    if here is not None:
        options = {
            key: value for group in optimizer.param_groups for key, value in group.items() if key != "params"
        }
        _check_options({**options, **defaults}, tree["param_groups"])
        _check_shapes(optimizer, here, names, tree["state"])


def names_to_find(
    names: Sequence[Sequence[str]], trained: Sequence[Sequence[bool]], groups: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Names without frozen parameters that a state does not list: engines drop them, and they have no state.

    Args:
        names: of the parameters of each group of an optimizer.
        trained: whether each of them is trained.
        groups: the groups of the saved state.
    """
    there = {name for group in groups for name in group["params"]}
    return [
        [name for name, is_trained in zip(*group, strict=True) if is_trained or name in there]
        for group in zip(names, trained, strict=True)
    ]


def _state_fill(
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    current: Mapping[str, Any],
) -> TreeFill:
    """Where the tensors of a saved state go: to those of the optimizer, or to new ones that are like the parameter."""
    positions = _positions(names, current["param_groups"])
    state = {positions[name]: value for name, value in tree["state"].items()} | tree.get("global_state", {})
    parameters = {
        number: parameter
        for group, numbered in zip(optimizer.param_groups, current["param_groups"], strict=True)
        for parameter, number in zip(group["params"], numbered["params"], strict=True)
    }

    def choose(saved: SavedTensor | torch.Tensor, here: Any, path: tuple[Any, ...]) -> Leaf | Like | None:
        if isinstance(saved, torch.Tensor) and why_not_plain(saved) is not None:
            return None
        if _can_take(here, saved):
            return here  # type: ignore[no-any-return]
        parameter = parameters.get(path[0])
        if (
            parameter is None
            or parameter.shape != saved.shape
            or not (is_sharded(parameter) or not parameter.is_cpu)
        ):
            return None
        return Like(parameter, saved.dtype)

    # An engine may have one step for all parameters; torch's optimizers count each parameter's in place.
    return TreeFill(state, current["state"], choose, apart=True)


def _can_take(here: Any, saved: SavedTensor | torch.Tensor) -> bool:
    fits = here.is_contiguous() if type(here) is torch.Tensor else is_sharded(here)
    return (
        fits
        and (here.shape, here.dtype) == (saved.shape, saved.dtype)
        and not here.is_inference()
        and not here.requires_grad
    )


def _torch_class(optimizer: torch.optim.Optimizer) -> str | None:
    """The class of torch whose code steps, which relies on states and options that torch made; None: another's."""
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    name = next(kinds).__name__
    return None if name == "Optimizer" else name


def _check_options(defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for name, default in defaults.items():
            if name in group and not (_is_like(group[name], default) and _is_inside(name, group[name])):
                raise StateMismatchError(
                    f"the saved optimizer has {name} = {str(group[name])[:80]} in group {number}, which cannot take "
                    f"the place of {default!r}. Build the optimizer as it was when the checkpoint was saved"
                )


def _is_like(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, bool):
        return value is None or isinstance(value, bool)
    if isinstance(default, (tuple, list)):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(default)
            and all(map(_is_like, value, default))
        )
    if isinstance(default, (int, float, Tensor)):
        scalar = isinstance(value, Tensor | SavedTensor) and value.shape.numel() == 1
        return scalar or _is_real(value)
    return True


def _is_inside(name: str, value: Any) -> bool:
    """Whether an option is in the range for which torch's optimizers can step."""
    return name != "betas" or all(0 <= beta < 1 for beta in value if _is_real(beta))


def _is_real(value: Any) -> bool:
    """Whether a value is a number that every dtype of torch can hold or round."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) >= 1 << 63


def _check_shapes(
    optimizer: torch.optim.Optimizer, kind: str, names: Sequence[Sequence[str]], state: Mapping[str, Any]
) -> None:
    for group, group_names in zip(_groups(optimizer), names, strict=True):
        for parameter, name in zip(group, group_names, strict=True):
            if name not in state:
                continue
            needed = dict.fromkeys(_MADE_AT_ONCE.get(kind, ()), object)
            check_form(state[name], needed, f"the saved optimizer's state of {name}")
            for key, value in state[name].items():
                shape = (
                    parameter.shape if key in _LIKE_PARAMETER else torch.Size() if key in _SCALARS else None
                )
                # An engine's parameter may show the shape of its part.
                known = is_sharded(parameter) or not (shape and isinstance(value, SavedTensor))
                if shape is not None and known and (misfit := _misfit(kind, key, value, shape)):
                    raise StateMismatchError(
                        f"the saved optimizer has {misfit} as {key} of {name}, where shape {list(shape)} was expected. "
                        "Build the optimizer and the models as they were when the checkpoint was saved"
                    )


def _misfit(kind: str, key: str, value: Any, shape: torch.Size) -> str | None:
    """What a state is, in words, if it has not the shape; None: it has."""
    if kind == "SGD" and key == "momentum_buffer" and value is None:  # before the first step
        return None
    if isinstance(value, Tensor | SavedTensor):
        if isinstance(value, Tensor) and why_not_plain(value) is not None and not is_sharded(value):
            return None if value.is_sparse and value.shape == shape else f"one {value.layout} tensor"
        fits = value.shape == shape or (not shape and value.shape.numel() == 1)
        if fits and not shape and (value.dtype == torch.bool or value.dtype.is_complex):
            return f"one {value.dtype}"
        if fits and not shape and isinstance(value, Tensor) and bool(value < 0):
            return f"the number {value.item()}"
        return None if fits else f"shape {list(value.shape)[:20]}"
    return (
        None
        if _is_real(value) and not shape and value >= 0
        else f"one {type(value).__qualname__} {value!r:.20}"
    )


def _groups(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]


def _parameter_names(
    groups: Sequence[Sequence[Tensor]], models: Sequence[nn.Module | NamedModel]
) -> list[list[str]]:
    known: dict[int, str] = {}
    for index, model in enumerate(named_models(models)):
        for name, parameter in model.parameters().items():
            known.setdefault(id(parameter), f"model_{index}.{name}")
    return [
        [known.get(id(p), f"unnamed.{g}.{i}") for i, p in enumerate(group)] for g, group in enumerate(groups)
    ]


def _positions(names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Name → the number that the optimizer's own state dict gives the parameter."""
    return {
        name: number
        for group_names, group in zip(names, groups, strict=True)
        for name, number in zip(group_names, group["params"], strict=True)
    }


def _check_parameters(
    names: Sequence[Sequence[str]], all_names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> None:
    saved = Counter(frozenset(group["params"]) for group in groups)
    here = {name for group in names for name in group}
    there = {name for group in saved for name in group}
    problems = []
    if missing := sorted(here - there):
        problems.append(f"not in the checkpoint: {listed(missing)}")
    if unexpected := sorted(there - here):
        problems.append(f"not in the optimizer: {listed(unexpected)}")
    if not problems:
        problems = [
            f"parameters that form a group here, but not in the checkpoint: {listed(group)}"
            for group in names
            if group and frozenset(group) not in saved
        ]
    without = sum(not group for group in all_names)
    if not problems and saved[frozenset()] != without:
        problems = [f"groups without parameters: {saved[frozenset()]} in the checkpoint, {without} here"]
    if problems:
        raise StateMismatchError(
            f"the saved optimizer does not fit; {'; '.join(problems)}. Build the optimizer and the models as "
            "they were when the checkpoint was saved"
        )


def steps_only(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> bool:
    """Whether every parameter of an optimizer belongs to one of the models."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    return all(id(p) in known for group in optimizer.param_groups for p in group["params"])
