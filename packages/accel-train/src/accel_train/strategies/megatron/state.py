"""Saving and loading a rank's share of an engine's weights and optimizer states, by the names of the script's model.

Weights are those that the optimizer updates: in float32 if the model computes in bfloat16. The distributed optimizer
cuts flattened tensors between ranks anywhere, so a rank's share is a range of a tensor's elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ckpt import Part
from accel_ckpt.errors import StateMismatchError
from accel_ckpt.format.saved_tensors import SavedTensor, fill_all
from accel_ckpt.parts import fill_part
from accel_train.strategies.engines import check_groups
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.layout import Dims, Rule
from accel_train.strategies.megatron.runtime import Groups

__all__ = ["MegatronState", "run_parts"]

WITHOUT_STATE = "without_state"
"""Key of a saved optimizer that was saved by `no_save_optim`."""


class _Known(NamedTuple):
    """Description of a tensor for ranks without it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def run_parts(
    rule: Rule, dims: Dims, shape: Sequence[int], values: Tensor, start: int
) -> dict[str, list[Part]]:
    """Find the boxes of the model's tensors in a range of a flattened Megatron tensor; views of `values`.

    Args:
        rule: rule of Megatron's tensor.
        dims: sizes that determine this rank's shares.
        shape: shape of Megatron's tensor on this rank.
        values: the elements of the range, 1-D.
        start: index of the first one in the flattened tensor.
    """
    found: dict[str, list[Part]] = {}
    if not shape:  # one value, which cannot be cut
        held = values.numel() > 0
        whole_parts = rule.parts(values.view(()) if held else torch.empty((), device="meta"), dims)
        return {name: list(parts) if held else [] for name, parts in whole_parts.items()}
    boxes = Part.of_flat(values, start, shape)
    width = int(torch.Size(shape[1:]).numel())
    # Rows with a gap between them, so that strides tell a transposed view of one column as well.
    pitch = width + 1 if len(shape) > 1 else 1
    strides = (pitch, *torch.empty(tuple(shape), device="meta").stride()[1:])
    places = torch.empty_strided(tuple(shape), strides, device="meta")
    for name, parts in rule.parts(places, dims).items():
        for part in parts:
            kept = found.setdefault(name, [])
            if part.is_empty:
                continue
            turned = part.tensor.dim() == 2 and part.tensor.stride(0) < part.tensor.stride(1)
            rows = part.tensor.shape[-1] if turned else part.tensor.shape[0]
            offsets = part.offsets[::-1] if turned else part.offsets
            whole = part.shape[::-1] if turned else part.shape
            first = part.tensor.storage_offset() // pitch
            for box in boxes:
                low = max(box.offsets[0], first)
                high = min(box.offsets[0] + box.tensor.shape[0], first + rows)
                if low >= high:
                    continue
                piece = box.tensor[low - box.offsets[0] : high - box.offsets[0]]
                at = [offsets[0] + low - first]
                at += [own + inner for own, inner in zip(offsets[1:], box.offsets[1:], strict=True)]
                if turned:
                    kept.append(Part(piece.t(), tuple(at[::-1]), tuple(whole[::-1])))
                else:
                    kept.append(Part(piece, tuple(at), tuple(whole)))
    return found


class MegatronState:
    """Weights and optimizer states of one engine.

    Args:
        built: the stage.
        groups: this rank's index in Megatron's process groups.
        chunk: the stage, with or without Megatron's data-parallel wrapper.
        optimizer: Megatron's optimizer; None: the model is only evaluated.
    """

    def __init__(self, built: Built, groups: Groups, chunk: Any, optimizer: Any) -> None:
        self._built = built
        self._groups = groups
        self._chunk = chunk
        self._optimizer = optimizer
        self._known = self._all_names()

    def _all_names(self) -> dict[str, _Known]:
        """Every tensor of the model, in the order of its stages."""
        own: dict[str, _Known] = {}
        for rule, parameter in self._built.parameters():
            dtype = self._master(parameter)[0].dtype
            for name, parts in rule.parts(parameter.detach(), self._built.dims).items():
                own.setdefault(name, _Known(parts[0].shape, dtype))
        if self._groups.pp_size == 1:
            return own
        stages: list[dict[str, _Known]] = [{} for _ in range(self._groups.pp_size)]
        dist.all_gather_object(stages, own, group=self._groups.pp_group)
        return {name: known for stage in stages for name, known in stage.items()}

    # Where values are

    def _master(self, parameter: Any) -> tuple[Tensor, int | None]:
        """What the optimizer updates, and where this run begins; None: it is the whole of this rank's tensor."""
        optimizer = self._optimizer
        if optimizer is None or not parameter.requires_grad:
            return parameter.detach(), None
        if getattr(parameter, "main_param_sharded", False):
            main = parameter.main_param
            if main is None:
                return torch.empty(0, dtype=torch.float32, device=parameter.device), 0
            return main.detach(), self._start(parameter)
        main = getattr(parameter, "main_param", None)
        return (parameter if main is None else main).detach(), None

    def _start(self, parameter: Any) -> int:
        return int(self._optimizer._get_model_param_range_map(parameter)["param"].start)

    def _stepped(self, parameter: Any) -> tuple[Any, int | None] | None:
        """The tensor that the script's optimizer holds for a parameter, and its run; None: another rank's has it."""
        ranges = getattr(self._optimizer, "model_param_group_index_map", None)
        if ranges is None:
            main = getattr(parameter, "main_param", None)
            return (parameter if main is None else main), None
        place = ranges.get(parameter)
        if place is None:
            return None
        group, order = place
        return self._optimizer.optimizer.param_groups[group]["params"][order], self._start(parameter)

    def _parts(
        self, rule: Rule, parameter: Tensor, values: Tensor, start: int | None
    ) -> dict[str, list[Part]]:
        dims = self._built.dims
        if start is None:
            return dict(rule.parts(values, dims))
        return run_parts(rule, dims, parameter.shape, values, start)

    def _nothing(self, name: str, dtype: torch.dtype | None = None) -> list[Part]:
        known = self._known[name]
        return [Part.nothing(known.shape, dtype or known.dtype)]

    # Weights

    def model_state(self) -> dict[str, Any]:
        """This rank's share of the weights, by the names of the script's model."""
        found: dict[str, list[Part]] = {}
        for rule, parameter in self._built.parameters():
            values, start = self._master(parameter)
            for name, parts in self._parts(rule, parameter, values, start).items():
                found[name] = [*found.get(name, []), *(part for part in parts if not part.is_empty)]
        state: dict[str, Any] = {name: found.get(name) or self._nothing(name) for name in self._known}
        architecture = self._built.architecture
        if architecture is not None and architecture.tied is not None:
            embedding, output = architecture.tied
            state[output] = state[embedding]
        return state

    def after_loading(self) -> None:
        """Update the weights that the model computes with, after values were filled in."""
        optimizer = self._optimizer
        if optimizer is not None and hasattr(optimizer, "_copy_main_params_to_model_params"):
            with torch.no_grad():
                optimizer._copy_main_params_to_model_params()
            if hasattr(optimizer, "data_parallel_group"):
                self._chunk.start_param_sync(force_sync=True)

    # Optimizer

    def _names(self) -> list[list[str]]:
        """The names of each group of the script's optimizer, on all stages alike."""
        place_of = {id(parameter): place for place, group in enumerate(self.groups) for parameter in group}
        own: dict[str, int] = {}
        for rule, parameter in self._built.parameters():
            place = place_of.get(id(parameter))
            if place is not None:
                for name in rule.parts(parameter.detach(), self._built.dims):
                    own[name] = place
        stages: list[dict[str, int]] = [own]
        if self._groups.pp_size > 1:
            stages = [{} for _ in range(self._groups.pp_size)]
            dist.all_gather_object(stages, own, group=self._groups.pp_group)
        places = {name: place for stage in stages for name, place in stage.items()}
        return [
            [f"model_0.{name}" for name in self._known if places.get(name) == place]
            for place in range(len(self.groups))
        ]

    def use_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Record the parameters of each group of the script's optimizer; collective."""
        self.groups = [list(group) for group in groups]
        self.names = self._names()

    def optimizer_state(self, base: torch.optim.Optimizer, saves: bool) -> dict[str, Any]:
        """The state of the script's optimizer by name; leaves as in `model_state`.

        Args:
            base: the script's optimizer.
            saves: False: only its groups' options.
        """
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in base.param_groups
        ]
        tree: dict[str, Any] = {
            "state": {},
            "param_groups": [
                {**mine, "params": list(names)} for mine, names in zip(options, self.names, strict=True)
            ],
        }
        if not saves:
            return {**tree, WITHOUT_STATE: True}
        kinds = self._kinds(base)
        for name in (name for group in self.names for name in group):
            short = name.removeprefix("model_0.")
            entry = {
                key: self._nothing(short, value) if isinstance(value, torch.dtype) else _own(value)
                for key, value in kinds.items()
            }
            if entry:
                tree["state"][name] = entry
        for rule, parameter, start, state in self._states(base):
            for key, value in state.items():
                if not _is_elementwise(value):
                    continue
                for short, parts in self._parts(rule, parameter, value, start).items():
                    entry = tree["state"][f"model_0.{short}"]
                    held = [part for part in [*entry[key], *parts] if not part.is_empty]
                    entry[key] = held or entry[key]
        return tree

    def _states(self, base: torch.optim.Optimizer) -> list[tuple[Rule, Tensor, int | None, dict[str, Any]]]:
        """Of each parameter that this rank steps: its rule, itself, where its run begins, and its state."""
        found: list[tuple[Rule, Tensor, int | None, dict[str, Any]]] = []
        trained = {id(parameter) for group in self.groups for parameter in group}
        for rule, parameter in self._built.parameters():
            stepped = self._stepped(parameter) if id(parameter) in trained else None
            if stepped is None:
                continue
            held, start = stepped
            found.append((rule, parameter, start, base.state.setdefault(held, {})))
        return found

    def _kinds(self, base: torch.optim.Optimizer) -> dict[str, Any]:
        """What every parameter's state has: of tensors the dtype, of the rest the value; alike on all ranks."""
        own: dict[str, Any] = {}
        for _, _, _, state in self._states(base):
            own |= {
                key: value.dtype
                if _is_elementwise(value)
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for key, value in state.items()
            }
        everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, own)
        return next((kinds for kinds in everywhere if kinds), {})

    def check_optimizer_state(self, tree: Mapping[str, Any], loads: bool) -> None:
        """Check that `load_optimizer_state` can load a state; changes nothing.

        Raises:
            StateMismatchError: the parameters or their groups differ, or the optimizer was saved without its state.
        """
        check_groups(self.names, tree)
        if loads and tree.get(WITHOUT_STATE):
            raise StateMismatchError(
                "the optimizer was saved without its state (no_save_optim). Set MegatronLMPlugin(no_load_optim=True) "
                "to continue with a new one"
            )

    def load_optimizer_state(self, base: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` returned, or the state of a plain optimizer of the same parameters."""
        saved = {frozenset(group["params"]): group for group in tree["param_groups"]}
        for group, names in zip(base.param_groups, self.names, strict=True):
            options = saved.get(frozenset(names), {})
            group.update({key: value for key, value in options.items() if key != "params"})
        states = tree["state"]
        with torch.no_grad():
            for rule, parameter, start, state in self._states(base):
                held = self._stepped(parameter)
                assert held is not None, "listed above"
                state.clear()
                for short in rule.parts(torch.empty(parameter.shape, device="meta"), self._built.dims):
                    for key, value in states.get(f"model_0.{short}", {}).items():
                        self._load(rule, parameter, start, state, held[0], short, key, value)

    def _load(
        self,
        rule: Rule,
        parameter: Tensor,
        start: int | None,
        state: dict[str, Any],
        held: Tensor,
        short: str,
        key: str,
        value: Any,
    ) -> None:
        if not isinstance(value, Tensor | SavedTensor) or not len(value.shape):
            found = value.read() if isinstance(value, SavedTensor) else value
            state[key] = found.clone() if isinstance(found, Tensor) else found
            return
        if key not in state:
            state[key] = torch.zeros_like(held, dtype=value.dtype)
        parts = [
            part
            for part in self._parts(rule, parameter, state[key], start).get(short, [])
            if not part.is_empty
        ]
        if not parts:
            return
        if isinstance(value, SavedTensor):
            fill_all([(value, parts)])
        else:
            fill_part(parts, value)


def _own(value: Any) -> Any:
    """A value that every parameter has: of its own, because optimizers add to a step in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_elementwise(value: object) -> bool:
    """Whether a state has an element for each of its parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0
