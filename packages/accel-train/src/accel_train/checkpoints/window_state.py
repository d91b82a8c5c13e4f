"""Saving and restoring unfinished accumulation windows: their gradients and counts.

Every rank saves its own, because ranks hold different gradients until a window ends. The same number of ranks restores
them bit for bit. Another number of ranks gets the mean over the ranks that saved (for gradients of sums over items: the
sum), as the end of the window would have computed.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.format.forms import OTHERS, check_form, natural, positive
from accel_ckpt.modules.named_model import NamedModel, named_models
from accel_state.messages import first_line
from accel_train.errors import AccumulationError
from accel_train.loop.accumulation import Accumulator, Window
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.optimizer_parameters import parameters_of
from accel_train.state_part import SavedTrees, StatePart, Trees
from accel_train.strategies.base import Strategy
from accel_train.strategies.gradients import any_divided, local_part
from accel_train.strategies.window_gradients import OwnGradient, UnreducedGradient

__all__ = [
    "FORM",
    "Trained",
    "WindowStates",
    "check",
    "dump",
    "for_other_ranks",
    "holds_gradients",
    "load",
]


_NAME = re.compile(r"(?P<kind>prepared|model)_(?P<number>\d{1,9})(\.(?P<path>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Trained:
    """The prepared objects that windows and gradients are named after.

    Args:
        models: the models as they were before wrapping.
        prepared: the same as the script knows them.
        optimizers: the prepared optimizers.
        loaders: the prepared loaders.
        named: the models with their canonical names, where these are worked out already.
        engine_optimizers: optimizers hold tensors of an engine, whose gradients are no parameters'.
    """

    models: Sequence[nn.Module]
    prepared: Sequence[nn.Module]
    optimizers: Sequence[AcceleratedOptimizer]
    loaders: Sequence[Any]
    named: Sequence[NamedModel] = ()
    engine_optimizers: bool = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything that can have a gradient, by name, each once."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for index, model in enumerate(self.named or named_models(self.models)):
            for name, parameter in model.parameters().items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"model_{index}.{name}"] = parameter
        for index, optimizer in enumerate(() if self.engine_optimizers else self.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        found[f"optimizer_{index}.{number}.{place}"] = parameter
        return found

    def knows(self, models: Sequence[nn.Module]) -> bool:
        """Whether `name_of` knows all of these models."""
        known = {id(module) for model in self.models for module in model.modules()}
        return known.union(map(id, self.prepared)).issuperset(map(id, models))

    def name_of(self, model: nn.Module) -> str:
        """The name by which a model, or a part of one, is found again."""
        for index, (plain, prepared) in enumerate(zip(self.models, self.prepared, strict=True)):
            if model is prepared:
                return f"prepared_{index}"
            for name, module in plain.named_modules():
                if module is model:
                    return f"model_{index}.{name}"
        raise AccumulationError(
            f"accumulate() was given a {type(model).__name__} that is not part of a prepared model, and its window is "
            "not finished: its gradients cannot be saved. Prepare the model, or save when the window has ended."
        )

    def model_called(self, name: str) -> nn.Module:
        """The inverse of `name_of`.

        Raises:
            StateMismatchError: no prepared model has a part of this name.
        """
        found = _NAME.fullmatch(name)
        models = self.prepared if found and found["kind"] == "prepared" else self.models
        if found and int(found["number"]) < len(models):
            model = models[int(found["number"])]
            parts = dict(model.named_modules()) if found["path"] else {"": model}
            if (found["path"] or "") in parts:
                return parts[found["path"] or ""]
        raise accel_ckpt.StateMismatchError(
            f"the checkpoint holds an unfinished accumulation window of {name[:100]!r}, which is not a prepared model "
            "or a part of one. Prepare the same models as the script that saved it, with the same degrees (such as "
            "pp_size), or continue from a checkpoint saved after a step."
        )

    def number_of(self, loader: Any) -> int | None:
        """Which loader it is, or was made of by skipping."""
        state = getattr(loader, "epoch_state", None)
        return next((i for i, known in enumerate(self.loaders) if known.epoch_state is state), None)


class WindowStates(StatePart):
    """The unfinished accumulation windows of each rank.

    Args:
        accumulator: has the windows.
        trained: what they and their gradients are named after.
        strategy: makes the gradients.
    """

    def __init__(self, accumulator: Accumulator, trained: Trained, strategy: Strategy) -> None:
        self._accumulator, self._trained, self._strategy = accumulator, trained, strategy

    def dump(self, trees: Trees) -> None:
        """A tree of this rank."""
        trees.own["windows"] = dump(self._accumulator, self._trained, self._strategy)

    def needs_all_ranks(self, trees: Trees) -> str | None:
        """Every rank has gradients of its own."""
        if not holds_gradients(trees.own["windows"]):
            return None
        return (
            "inside an accumulation window: the gradients that the other processes have accumulated would be lost. "
            "Save after optimizer.step(), where `accelerator.sync_gradients` is true, or call save_state() on all "
            "processes."
        )

    def read(self, saved: SavedTrees) -> Mapping[str, Any] | None:
        """This rank's windows, or its part of those of other ranks; None: another program saved."""
        if "windows" not in saved.known:
            return None
        windows: Mapping[str, Any] = saved.known["windows"]
        if saved.own is None and (windows["windows"] or holds_gradients(windows)):
            raise accel_ckpt.StateMismatchError(
                f"{saved.directory} was saved inside an accumulation window and holds no state of rank {saved.rank}, "
                "whose gradients it would need. Load a checkpoint that is complete, or one that was saved between two "
                "steps."
            )
        # The main process saves alone only where no window is unfinished, so what it saved holds for any rank.
        same = saved.ranks == saved.world_size or saved.saved_by < saved.world_size
        check(self._trained, windows, self._strategy, same_ranks=same)
        if same and _fits(self._trained, windows, self._strategy, same_ranks=True):
            return windows
        trees = [saved.of_rank(rank)["windows"] for rank in range(saved.world_size)]
        for tree in trees:
            check(self._trained, tree, self._strategy, same_ranks=same)
        windows = for_other_ranks(trees, saved.ranks, saved.rank)
        check(self._trained, windows, self._strategy, same_ranks=same)
        return windows

    def load(self, taken: Mapping[str, Any] | None, saved: SavedTrees) -> None:
        """Open them again; without any, drop those that are open here."""
        if taken is None:
            _drop(self._accumulator, self._trained, self._strategy)
        else:
            load(self._accumulator, self._trained, taken, self._strategy)


# Saving


def dump(accumulator: Accumulator, trained: Trained, strategy: Strategy) -> dict[str, Any]:
    """The unfinished windows of this rank as a tree; tensors in it are the gradients themselves.

    Inside `accumulate()` they have the values that they will have when the block ends.

    Raises:
        AccumulationError: a window belongs to a model that has no name in the state, or its gradients are where only
            the strategy's engine can reach them.
    """
    windows = accumulator.unfinished()
    counting = any(window.backwards for window in [*windows, accumulator.manual])
    parameters, states = trained.parameters(), strategy.states
    waiting = _gradients(trained, parameters, counting)
    held = states.gradients.unreduced(parameters)
    kept = {name: value for name, each in held.items() if (value := each.value) is not None}
    if (
        counting or waiting or kept or states.gradients.wait_in_engine
    ) and not strategy.capabilities.saves_windows:
        raise AccumulationError(
            f"The state cannot be saved here: gradients wait for a step, and the strategy {strategy.name!r} cannot "
            "save them. Save after optimizer.step(), outside of an unfinished accumulation window."
        )
    gradients = {name: _pack(gradient) for name, gradient in waiting.items()}
    own = _owns_gradients(strategy, parameters, held) and all(
        # Zeros in parts, as zero_grad(set_to_none=False) leaves them, add nothing to what is held back.
        isinstance(packed, str)
        for name, packed in gradients.items()
        if name in held
    )
    if own:
        gradients |= {name: _pack(value.values) for name, value in kept.items()}
        kept = {}
    return {
        "engine": None if own else strategy.name,
        "averaged_over": strategy.loss.size,
        "sync_gradients": accumulator.sync_gradients,
        "last_owner": _owner_number(accumulator.last_owner, trained),
        "windows": [_dump_window(window, trained) for window in windows],
        "manual": _dump_window(accumulator.manual, trained),
        "cut_batches": _dump_cuts(accumulator, trained),
        "complete": [
            {"models": [trained.name_of(model) for model in window.models], "noted": _noted(window)}
            for window in accumulator.windows()
            if all(window is not other for other in windows) and trained.knows(window.models)
        ],
        "gradients": gradients,
        "engine_waits": states.gradients.wait_in_engine,
        "held_back": {
            name: {"values": _pack(value.values), "placements": list(value.placements)}
            for name, value in kept.items()
        },
    }


def _owns_gradients(
    strategy: Strategy, parameters: Mapping[str, Tensor], held: Mapping[str, UnreducedGradient]
) -> bool:
    """Whether each rank has whole gradients, as plain PyTorch has, which any number of ranks can take over.

    Args:
        strategy: the one that makes them.
        parameters: those that can have a gradient; of divided ones each rank keeps a part, if it is not held back.
        held: of the parameters, those whose gradients are held back.
    """
    hidden = strategy.capabilities.hides_gradients and not (held or strategy.states.gradients.are_plain)
    if strategy.loss.repeats or hidden:
        return False
    if any(each.mesh_dimensions for each in held.values()):
        return False
    return not any_divided(parameter for name, parameter in parameters.items() if name not in held)


def _gradients(trained: Trained, parameters: Mapping[str, nn.Parameter], counting: bool) -> dict[str, Tensor]:
    """Gradients in `parameter.grad` still to be used, without those that `zero_grad()` will drop after a step."""
    spent = {
        id(parameter)
        for optimizer in trained.optimizers
        if optimizer.gradients_spent and not counting
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and id(parameter) not in spent
    }


def _dump_window(window: Window, trained: Trained) -> dict[str, Any]:
    items = window.items
    names = {id(parameter): name for name, parameter in trained.parameters().items()} if window.kept else {}
    return {
        "models": [trained.name_of(model) for model in window.models],
        "micro_batches": window.micro_batches,
        "planned": window.planned,
        "backwards": window.backwards,
        "items": int(items.item()) if isinstance(items, Tensor) else items,
        "weighted": window.weighted,
        "loader": _owner_number(window.owner, trained),
        # Zeros need no correction; DDP puts others in their place where it forms its buckets again.
        "kept": {names[id(p)]: _pack(before) for p, before in window.kept if before.any()},
        "noted": _noted(window),
    }


def _noted(window: Window) -> Mapping[str, Any] | None:
    noted = window.noted
    if noted is None or isinstance(noted, Mapping):  # a loaded one, of which no use was made
        return noted
    saved: Mapping[str, Any] = noted.dump()
    return saved


def _dump_cuts(accumulator: Accumulator, trained: Trained) -> list[dict[str, Any]]:
    """Save how the script cuts batches into micro-batches, which a run that resumes at the last batch cannot see."""
    return [
        {
            "models": [trained.name_of(model) for model in window.models],
            "parts": window.cut.part,
            "rows": window.cut.rows,
        }
        for window in accumulator.windows()
        if window.cut.part > 1
    ]


def _owner_number(owner: weakref.ref[Any] | None, trained: Trained) -> int | None:
    loader = None if owner is None else owner()
    return None if loader is None else trained.number_of(loader)


def _pack(gradient: Tensor) -> Any:
    gradient = local_part(gradient.detach())
    if gradient.is_sparse:
        return {
            "indices": gradient._indices(),
            "values": gradient._values(),
            "size": list(gradient.shape),
            "coalesced": gradient.is_coalesced(),
        }
    # What zero_grad(set_to_none=False) leaves need not be written out; that it is there makes a difference.
    return "zeros" if not gradient.any() else gradient


# Loading


def _count(value: Any) -> bool:
    """A number of items, 0 or more."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _indices(value: Any) -> bool:
    """A tensor of 64-bit integers."""
    return isinstance(value, Tensor) and value.dtype == torch.int64


_SPARSE = {"indices": _indices, "values": Tensor, "size": [natural], "coalesced": bool}


def _gradient(value: Any) -> bool:
    """A tensor, "zeros", or the parts of a sparse tensor."""
    if isinstance(value, Mapping):
        check_form(value, _SPARSE, "a sparse gradient")
        return True
    return isinstance(value, Tensor) or value == "zeros"


def _placement(value: Any) -> bool:
    """How a dimension of a mesh divides a tensor; see `OwnGradient`."""
    return isinstance(value, str) and _PLACEMENT.fullmatch(value) is not None


_PLACEMENT = re.compile(r"whole|sum|avg|\d{1,2}")
_HELD_BACK = {"values": _gradient, "placements": [_placement]}

_WINDOW = {
    "models": [str],
    "micro_batches": natural,
    "planned": positive,
    "backwards": natural,
    "items": _count,
    "weighted": bool,
    "loader": (None, natural),
}

_NOTED = (None, {"loss": float, "weight": float, "backwards": natural, "verdict": (None, str)})
_CUT = {"models": [str], "parts": positive, "rows": (None, natural)}

FORM = {
    "engine": (None, str),
    "averaged_over": positive,
    "sync_gradients": bool,
    "last_owner": (None, natural),
    "windows": [_WINDOW],
    "manual": _WINDOW,
    "gradients": {OTHERS: _gradient},
}
"""Of a tree that `dump` returns."""


def load(accumulator: Accumulator, trained: Trained, tree: Mapping[str, Any], strategy: Strategy) -> None:
    """Restore the windows and gradients of a tree that `dump` made for this number of ranks. Collective."""
    accumulator.forget()
    parameters, states = trained.parameters(), strategy.states
    held = states.gradients.unreduced(parameters)
    gradients = dict(tree["gradients"])
    kept = {
        name: _own_gradient(saved["values"], saved["placements"]) for name, saved in _held_back(tree).items()
    }
    if tree.get("engine") is None:
        kept |= {name: _own_gradient(gradients.pop(name)) for name in [*gradients] if name in held}
    for name, parameter in parameters.items():
        parameter.grad = _unpack(gradients[name], parameter) if name in gradients else None
    states.gradients.set_unreduced(parameters, kept)
    zeros = {
        id(parameters[name])
        for name, packed in tree["gradients"].items()
        if name in parameters and isinstance(packed, str)
    }
    for optimizer in trained.optimizers:
        if zeros.issuperset(id(p) for p in parameters_of(optimizer) if p.grad is not None):
            optimizer.note_zeros()
    for saved in tree["windows"]:
        models = tuple(trained.model_called(name) for name in saved["models"])
        window = accumulator.window_of(models)
        _load_window(window, saved, trained, parameters)
        window.synchronising = False
    _load_window(accumulator.manual, tree["manual"], trained, parameters)
    for saved in tree.get("complete", ()):
        accumulator.window_of(tuple(map(trained.model_called, saved["models"]))).noted = saved["noted"]
    for saved in tree.get("cut_batches", ()):
        cut = accumulator.window_of(tuple(trained.model_called(name) for name in saved["models"])).cut
        cut.part, cut.rows = int(saved["parts"]), saved["rows"]
    accumulator.last_owner = _owner(tree["last_owner"], trained)
    accumulator.sync_gradients = tree["sync_gradients"]


def _drop(accumulator: Accumulator, trained: Trained, strategy: Strategy) -> None:
    """Begin without windows and gradients."""
    accumulator.forget()
    parameters = trained.parameters()
    for parameter in parameters.values():
        parameter.grad = None
    strategy.states.gradients.set_unreduced(parameters, {})


def _own_gradient(packed: Any, placements: Sequence[str] = ()) -> OwnGradient | None:
    """A gradient to be held back; None: zeros."""
    return None if isinstance(packed, str) else OwnGradient(_dense(packed), placements)


def _held_back(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved gradients that ranks had not reduced; older states have no such entry."""
    found: Mapping[str, Any] = tree.get("held_back", {})
    return found


def holds_gradients(tree: Mapping[str, Any]) -> bool:
    """Whether a tree holds gradients that wait for a step: not only what `zero_grad(set_to_none=False)` leaves."""
    counting = any(window["backwards"] for window in [*tree["windows"], tree["manual"]])
    return (
        counting
        or bool(_held_back(tree) or tree.get("engine_waits"))
        or any(not isinstance(packed, str) for packed in tree["gradients"].values())
    )


def check(trained: Trained, tree: Mapping[str, Any], strategy: Strategy, *, same_ranks: bool) -> None:
    """Whether a tree fits what is prepared; changes nothing.

    Args:
        trained: what is prepared.
        tree: what `dump` returned, or what a file says that it did.
        strategy: the one that continues.
        same_ranks: as many ranks continue as saved.

    Raises:
        CorruptCheckpointError: it is not what `dump` returns, such as a sparse gradient with an index outside of it.
        StateMismatchError: it has gradients for parameters that are not here, or in the form of another engine.
    """
    where = "the unfinished accumulation windows in the checkpoint: windows"
    check_form(tree, FORM, where)
    check_form(tree.get("cut_batches", ()), [_CUT], f"{where}['cut_batches']")  # states of before have none
    for window in (*tree["windows"], tree["manual"]):
        check_form(window.get("kept", {}), {OTHERS: _gradient}, f"{where}: kept")
        check_form(window.get("noted"), _NOTED, f"{where}: noted")
    check_form(tree.get("complete", ()), [{"models": [str], "noted": _NOTED}], f"{where}['complete']")
    check_form(_held_back(tree), {OTHERS: _HELD_BACK}, f"{where}['held_back']")
    check_form(tree.get("engine_waits", False), bool, f"{where}['engine_waits']")
    saved, parameters = tree.get("engine"), trained.parameters()
    held = strategy.states.gradients.unreduced(parameters)
    if holds_gradients(tree) and not _fits(trained, tree, strategy, same_ranks=same_ranks):
        same_ranks = same_ranks and tree["averaged_over"] == strategy.loss.size
        raise accel_ckpt.StateMismatchError(
            "the checkpoint was saved inside an accumulation window, whose gradients have the form of "
            + (f"the strategy {saved!r}" if saved is not None else "plain tensors")
            + f"; the strategy {strategy.name!r} cannot continue with them"
            + ("" if same_ranks or saved is None else " on another number of ranks, or with other degrees")
            + ". Continue with the same strategy, degrees and number of ranks, or from a checkpoint saved after a step"
        )
    # Zeros are also of parameters that another rank has here, such as those of another stage.
    valued = {name for name, packed in tree["gradients"].items() if not isinstance(packed, str)}
    earlier = {name for window in (*tree["windows"], tree["manual"]) for name in window.get("kept", ())}
    unknown = sorted(((valued | earlier) - set(parameters)) | (set(_held_back(tree)) - set(held)))
    if unknown:
        raise accel_ckpt.StateMismatchError(
            f"the checkpoint holds gradients of an unfinished accumulation window for {', '.join(unknown[:5])}, which "
            "no prepared model of this rank has. Prepare the same models and optimizers as the script that saved it, "
            "with the same degrees (such as pp_size), or continue from a checkpoint saved after a step."
        )
    for name in valued:
        whole = saved is None and name in held
        shape = held[name].shape if whole else local_part(parameters[name].detach()).shape
        _check_gradient(name, tree["gradients"][name], parameters[name], list(shape))
    for window in (*tree["windows"], tree["manual"]):
        for name, packed in window.get("kept", {}).items():
            _check_gradient(name, packed, parameters[name], list(local_part(parameters[name].detach()).shape))
    for name, entry in _held_back(tree).items():
        _check_gradient(name, entry["values"], parameters[name], list(held[name].shape))
        _check_placements(name, entry["placements"], held[name])
    _check_owners(trained, tree)


def _fits(trained: Trained, tree: Mapping[str, Any], strategy: Strategy, *, same_ranks: bool) -> bool:
    """Whether the gradients of a tree have the form that this strategy's have on this rank; see `check`."""
    engine = tree.get("engine")
    if engine is not None:
        return bool(engine == strategy.name and same_ranks and tree["averaged_over"] == strategy.loss.size)
    parameters = trained.parameters()
    return _owns_gradients(strategy, parameters, strategy.states.gradients.unreduced(parameters))


def _check_placements(name: str, placements: Sequence[str], held: UnreducedGradient) -> None:
    divided = [int(word) for word in placements if word.isdecimal()]
    if len(placements) != held.mesh_dimensions or any(dim >= len(held.shape) for dim in divided):
        raise accel_ckpt.StateMismatchError(
            f"the checkpoint holds a gradient for {name} that is divided as {placements} over a mesh; here the mesh "
            f"has {held.mesh_dimensions} dimensions, and the gradient the shape {list(held.shape)}. Divide the model "
            "as it was when the state was saved"
        )


def _check_gradient(name: str, packed: Any, parameter: Tensor, here: list[int]) -> None:
    """Check that no index of a gradient points outside of it: an optimizer would write there unchecked."""
    if isinstance(packed, str):
        return
    there = packed["size"] if isinstance(packed, Mapping) else list(packed.shape)
    if list(there) != here:
        raise accel_ckpt.StateMismatchError(
            f"the checkpoint holds a gradient of shape {list(there)[:20]} for {name}, whose shape is {here}. Build the "
            "model as it was when the state was saved"
        )
    if isinstance(packed, Mapping):
        try:
            _unpack(packed, parameter)
        except (RuntimeError, TypeError, ValueError) as error:
            raise accel_ckpt.CorruptCheckpointError(
                f"the checkpoint holds an invalid sparse gradient for {name}: {first_line(error)}. The file is "
                "damaged, or another program wrote it; load another checkpoint"
            ) from error


def _check_owners(trained: Trained, tree: Mapping[str, Any]) -> None:
    windows = [*tree["windows"], tree["manual"]]
    for number in [tree["last_owner"], *(window["loader"] for window in windows)]:
        if number is not None and number >= len(trained.loaders):
            raise accel_ckpt.StateMismatchError(
                f"the checkpoint holds an unfinished accumulation window of loader {number}, and "
                f"{len(trained.loaders)} are prepared. Prepare the same loaders as the script that saved it."
            )
    named = [*windows, *tree.get("cut_batches", ()), *tree.get("complete", ())]
    for name in itertools.chain.from_iterable(window["models"] for window in named):
        trained.model_called(name)


def _load_window(
    window: Window, saved: Mapping[str, Any], trained: Trained, parameters: Mapping[str, nn.Parameter]
) -> None:
    window.reset()
    window.micro_batches = saved["micro_batches"]
    window.planned = saved["planned"]
    window.backwards = saved["backwards"]
    window.items = saved["items"]
    window.weighted = saved["weighted"]
    window.owner = _owner(saved["loader"], trained)
    window.noted = saved.get("noted")
    window.kept = [
        (parameters[name], local_part(_unpack(packed, parameters[name])))
        for name, packed in saved.get("kept", {}).items()
    ]


def _owner(number: int | None, trained: Trained) -> weakref.ref[Any] | None:
    return None if number is None else weakref.ref(trained.loaders[number])


def _unpack(packed: Any, parameter: Tensor) -> Tensor:
    empty = torch.empty_like(parameter, requires_grad=False)
    if isinstance(packed, str):
        return empty.zero_()
    if isinstance(packed, Tensor):
        local_part(empty).copy_(packed)
        return empty
    return torch.sparse_coo_tensor(
        packed["indices"],
        packed["values"],
        packed["size"],
        dtype=parameter.dtype,
        device=parameter.device,
        is_coalesced=packed["coalesced"],
        check_invariants=True,
    )


# Another number of ranks


def for_other_ranks(trees: Sequence[Mapping[str, Any]], ranks: int, rank: int) -> dict[str, Any]:
    """Convert windows that another number of ranks saved, for rank `rank` of `ranks`.

    A window's end averages gradients over ranks. So every rank gets the mean of those that were left; where losses are
    sums over items, their sum is what counts, and every rank gets an equal part of it.

    Raises:
        AccumulationError: the ranks held different numbers of micro-batches.
    """
    first = trees[0]
    counts = [[window["micro_batches"] for window in tree["windows"]] for tree in trees]
    if any(count != counts[0] for count in counts):
        raise AccumulationError(
            f"The state was saved inside an accumulation window, of which the ranks held {counts} micro-batches. "
            f"{ranks} ranks cannot continue there: continue with {len(trees)}, or save when the window has ended."
        )
    windows = [
        {
            **window,
            "items": sum(tree["windows"][place]["items"] for tree in trees) if rank == 0 else 0,
            "noted": _noted_by_all([tree["windows"][place].get("noted") for tree in trees], rank),
        }
        for place, window in enumerate(first["windows"])
    ]
    if any(window["weighted"] and window.get("kept") for window in (*windows, first["manual"])):
        raise AccumulationError(
            "The state was saved inside an accumulation window whose losses are divided by num_items, and an "
            f"optimizer keeps gradients of an earlier window. {ranks} ranks cannot continue there: continue with "
            f"{len(trees)}, or save when the window has ended."
        )
    items = sum(tree["manual"]["items"] for tree in trees) if rank == 0 else 0
    weighted = _weighted_models([*first["windows"], first["manual"]])
    names = {name: None for tree in trees for name in tree["gradients"]}
    gradients: dict[str, Any] = {}
    for name in names:
        owner = name.partition(".")[0]  # a parameter of no model is trained by every window
        by_items = None in weighted or owner in weighted or (bool(weighted) and owner.startswith("optimizer"))
        parts = [tree["gradients"][name] for tree in trees if name in tree["gradients"]]
        gradients[name] = _sum(parts, 1 / (ranks if by_items else len(trees)))
    return {
        **first,
        "averaged_over": ranks,
        "windows": windows,
        "manual": {
            **first["manual"],
            "items": items,
            "noted": _noted_by_all([tree["manual"].get("noted") for tree in trees], rank),
        },
        "gradients": gradients,
    }


def _noted_by_all(noted: Sequence[Mapping[str, Any] | None], rank: int) -> Mapping[str, Any] | None:
    """What a guard sums over ranks goes to the first one; that there is something, to all: they judge together."""
    known = [each for each in noted if each is not None]
    if not known:
        return None
    sums = {key: sum(each[key] for each in known) if rank == 0 else 0.0 for key in ("loss", "weight")}
    return {**known[0], **sums, "backwards": max(each["backwards"] for each in known)}


def _sum(parts: Sequence[Any], factor: float) -> Any:
    """The sum of packed gradients, times a factor; in float64, and dense."""
    dense = [_dense(part) for part in parts if not isinstance(part, str)]
    if not dense:
        return "zeros"
    total = torch.zeros(dense[0].shape, dtype=torch.float64)
    for part in dense:
        total += part
    return total * factor


def _dense(packed: Any) -> Tensor:
    """The values of a packed gradient that are not all zero."""
    if isinstance(packed, Tensor):
        return packed
    return _unpack(packed, torch.zeros(packed["size"], dtype=packed["values"].dtype)).to_dense()


def _weighted_models(windows: Sequence[Mapping[str, Any]]) -> set[str | None]:
    """Models whose window counts items; None: all of them."""
    found: set[str | None] = set()
    for window in windows:
        if window["weighted"]:
            names = [name.partition(".")[0].replace("prepared_", "model_") for name in window["models"]]
            found.update(names or [None])
    return found
