"""Saving and loading a rank's share of an engine's weights and optimizer states, as parts of tensors by name.

ZeRO flattens parameters and cuts the result between ranks anywhere, so a rank's share of a parameter is a range of its
elements: several boxes. Weights are the float32 copies that the optimizer updates, if it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel, Part
from accel_ckpt.divisions import Division, RankMesh
from accel_ckpt.errors import StateMismatchError
from accel_ckpt.format.saved_tensors import SavedTensor, fill_all
from accel_ckpt.modules.versions import versions_of, with_versions
from accel_ckpt.parts import FlatParts, Leaf, fill_part
from accel_ckpt.training.optimizers import names_to_find
from accel_train.strategies.engines import check_groups

__all__ = ["DeepSpeedState", "Share", "gathered_layers", "share_of"]


@dataclass(frozen=True)
class Share:
    """The range of a parameter's elements that this rank holds.

    Attributes:
        start: index of its first element in the flattened parameter.
        count: number of elements that are not padding.
        shape: shape of the whole parameter.
        division: how all ranks divide it, if that is known.
    """

    start: int
    count: int
    shape: tuple[int, ...]
    division: Division | None = None

    def parts(self, values: Tensor) -> list[Part]:
        """The boxes of a flat tensor with this rank's values; padding after them is left out."""
        if not self.count:
            found = [Part.nothing(self.shape, values.dtype)]
        elif not self.shape:
            found = [Part(values.reshape(-1)[0].reshape(()), (), ())]
        else:
            found = Part.of_flat(values.reshape(-1)[: self.count], self.start, self.shape)
        return found if self.division is None or not self.shape else FlatParts(found, self.division)


def share_of(parameter: Any) -> Share:
    """This rank's share of a parameter that stage 3 divides."""
    size = parameter.partition_numel()
    rank = torch.distributed.get_rank(group=parameter.ds_process_group)
    start = min(size * rank, parameter.ds_numel)
    return Share(start, min(size, parameter.ds_numel - start), tuple(parameter.ds_shape))


def gathered_layers(model: nn.Module) -> dict[str, Any]:
    """Gather the whole weights of a model whose layers DeepSpeed's tensor parallelism divides; collective."""
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    whole: dict[int, Tensor] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        # Dividing them again would make new tensors, which the engine's partitions do not know.
        before = [parameter.data for parameter in own]
        with GatherReplacedLayerParams(own, module):
            whole |= {id(parameter): parameter.detach().clone() for parameter in own}
        for parameter, values in zip(own, before, strict=True):
            parameter.data = values
    named = NamedModel(model)
    parameters = named.parameters()
    return {
        name: whole[id(parameters[name])] if name in parameters else value
        for name, value in named.state_dict().items()
    }


class DeepSpeedState:
    """Weights and optimizer states of one engine.

    Args:
        engine: DeepSpeed's engine.
        model: the module inside it.
        groups: the parameters of each group of the script's optimizer.
    """

    def __init__(self, engine: Any, model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.engine = engine
        self.model = model
        self._given = [list(group) for group in groups]  # with frozen parameters, which engines leave out
        self.groups = [[p for p in group if p.requires_grad] for group in groups]
        self.stage: int = int(engine.zero_optimization_stage())
        self.optimizer = engine.optimizer
        self.base = engine.basic_optimizer
        self._group_of = {id(p): i for i, group in enumerate(self.groups) for p in group}
        self._whole_flats = self._whole_flat_groups()
        self._masters = self._whole_masters()
        self._meshes: dict[Any, RankMesh] = {}
        self._flat_divisions = self._divisions()

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold parts of the weights: always true for float32 copies of 16-bit weights under ZeRO."""
        return self.stage == 3 or (self.stage > 0 and self.is_low)

    @property
    def is_low(self) -> bool:
        """Whether the model computes in 16 bits."""
        return bool(self.engine.fp16_enabled() or self.engine.bfloat16_enabled())

    def _whole_flat_groups(self) -> dict[int, tuple[Tensor, int, int]]:
        """Without ZeRO, for a fused optimizer: the float32 copy of each group, and where a parameter is in it."""
        optimizer = self.optimizer
        found: dict[int, tuple[Tensor, int, int]] = {}
        if self.stage or not hasattr(optimizer, "fp32_groups_flat"):
            return found
        for lows, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            start = 0
            for low in lows:
                found[id(low)] = flat, start, low.numel()
                start += low.numel()
        return found

    def _whole_masters(self) -> dict[int, Tensor]:
        """Without ZeRO: the float32 copy of each 16-bit parameter, whole on every rank."""
        optimizer = self.optimizer
        if self._whole_flats:
            return {
                id(low): flat.detach().narrow(0, start, count).view(low.shape)
                for group in self.groups
                for low in group
                for flat, start, count in [self._whole_flats[id(low)]]
            }
        if self.stage or not hasattr(optimizer, "fp32_groups"):
            return {}
        return {
            id(low): high
            for lows, highs in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for low, high in zip(lows, highs, strict=True)
        }

    # Where a parameter's values are

    def share(self, parameter: Any) -> Share:
        """What this rank holds of a parameter."""
        if self.stage == 3:
            rule = self._evenly(parameter.ds_process_group, parameter.partition_numel())
            return replace(share_of(parameter), division=rule)
        shape = tuple(parameter.shape)
        mapping = getattr(parameter, "_hp_mapping", None)
        if self.stage == 0:
            return Share(0, parameter.numel(), shape)
        division = self._flat_divisions.get(id(parameter))
        if mapping is None:
            return Share(0, 0, shape, division)
        address = mapping.lp_fragment_address
        return Share(address.start, address.numel, shape, division)

    def _divisions(self) -> dict[int, Division]:
        """With ZeRO's stages 1 and 2: how each parameter is divided, by its place in the flat tensor of its group."""
        found: dict[int, Division] = {}
        if self.stage not in (1, 2):
            return found
        optimizer = self.optimizer
        if hasattr(optimizer, "bf16_groups"):
            groups = optimizer.bf16_groups
            sizes = [flat.numel() for flat in optimizer.fp32_groups_flat_partition]
        else:
            groups, sizes = optimizer.round_robin_bit16_groups, optimizer.partition_size
        for group, size, ranks in zip(groups, sizes, optimizer.real_dp_process_group, strict=True):
            begin = 0
            for parameter in group:
                found[id(parameter)] = self._evenly(ranks, size, begin)
                begin += parameter.numel()
        return found

    def _evenly(self, group: Any, size: int, begin: int = 0) -> Division:
        """The rule by which the ranks of a group have equal ranges of a flat tensor, in which a parameter begins."""
        if group not in self._meshes:
            ranks = torch.distributed.get_process_group_ranks(group)
            self._meshes[group] = RankMesh.of(torch.tensor(ranks, device="cpu"))
        return Division(self._meshes[group], ((0, 1),), 0, (size, begin))

    def _flat_of(self, parameter: Any) -> tuple[Tensor, int, int] | None:
        """The flat tensor that the base optimizer steps, and where the parameter is in it; None: elsewhere."""
        if self.stage == 0:
            return self._whole_flats.get(id(parameter))
        if self.stage == 3:
            group, offset, count = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            return self.optimizer.fp32_partitioned_groups_flat[group], offset, count
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        address = mapping.get_hp_fragment_address()
        return self._group_flat(parameter), address.start, address.numel

    def _swapped(self) -> bool:
        return self.stage == 3 and bool(getattr(self.optimizer, "swap_optimizer", False))

    def master(self, parameter: Any) -> Tensor:
        """This rank's float32 values, flat; for frozen parameters the values that the model computes with."""
        if self.stage == 3:
            if not self._is_trained(parameter):
                values: Tensor = parameter.ds_tensor
                return values
            own: Tensor = self.optimizer.get_local_fp32_param(parameter)
            return own.clone() if self._swapped() else own
        if self.stage == 0 or not self._is_trained(parameter):
            whole: Tensor = self._masters.get(id(parameter), parameter.detach())
            return whole.reshape(-1)
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return torch.empty(0, dtype=torch.float32, device=parameter.device)
        flat: Tensor = mapping.hp_fragment
        return flat

    def _is_trained(self, parameter: Any) -> bool:
        return id(parameter) in self._group_of

    # Weights

    def model_state(self, named: NamedModel | None) -> dict[str, Any]:
        """This rank's share of all weights, by canonical name; buffers as they are."""
        named = named or NamedModel(self.model)
        parameters = named.parameters()
        state = named.state_dict()
        held = {
            name: self.leaf(parameters[name], value) if name in parameters else value
            for name, value in state.items()
        }
        return with_versions(held, versions_of(state))

    def leaf(self, parameter: nn.Parameter, value: Tensor) -> Leaf:
        """What this rank holds of a parameter."""
        if self.stage == 3 or (self.is_divided and self._is_trained(parameter)):
            return self.share(parameter).parts(self.master(parameter))
        return self._masters.get(id(parameter), value)

    def load_model_state(self, fill: Callable[[str, Leaf], None], names: Mapping[str, nn.Parameter]) -> None:
        """Fill this rank's part of every parameter, and update the weights that the model computes with.

        Args:
            fill: called with a name and the leaf to fill.
            names: the parameters to load, by name; the others keep their values.
        """
        seen: set[int] = set()
        for name, parameter in names.items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if self.stage == 0 or not self.is_divided:
                fill(name, self._masters.get(id(parameter), parameter.detach()))
                continue
            share, values = self.share(parameter), self.master(parameter)
            if share.count:
                fill(name, share.parts(values))
            if self._swapped() and self._is_trained(parameter):
                self.optimizer.set_local_hp_param(values, parameter)
        self._after_loading()

    def _after_loading(self) -> None:
        optimizer = self.optimizer
        if self.stage == 0:
            with torch.no_grad():
                for group in self.groups:
                    for parameter in group:
                        if id(parameter) in self._masters:
                            parameter.copy_(self._masters[id(parameter)])
        elif not self.is_divided:
            optimizer.refresh_fp32_params()
        elif self.stage < 3:
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                swapped = self._swapped() and optimizer._swappable_optimizer_subgroup(number)
                if swapped:
                    optimizer._optimizer_states_and_gradient_swap_in(number)
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
                if swapped:
                    optimizer._optimizer_states_and_gradient_swap_out(number)
            _free_gathered(self.model)

    # Optimizer

    def names(self, models: Sequence[nn.Module | NamedModel]) -> list[list[str]]:
        """The names of the parameters of each group, as accel-ckpt names those of plain optimizers."""
        known: dict[int, str] = {}
        for number, model in enumerate(models):
            named = model if isinstance(model, NamedModel) else NamedModel(model)
            for name, parameter in named.parameters().items():
                known.setdefault(id(parameter), f"model_{number}.{name}")
        return [
            [known.get(id(p), f"unnamed.{i}.{j}") for j, p in enumerate(group)]
            for i, group in enumerate(self._given)
        ]

    def _states(self, parameter: Any) -> dict[str, Any]:
        """The base optimizer's state of a parameter: flat tensors of this rank's elements, and single values."""
        found = self._flat_of(parameter)
        if self.stage == 0 and found is None:
            return dict(self.base.state.get(self._masters.get(id(parameter), parameter), {}))
        flat, start, count = (self._group_flat(parameter), 0, 0) if found is None else found
        state = self.base.state.get(flat, {})
        swapped = self._swapped()
        result: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                result[key] = value
            elif swapped:
                result[key] = self.optimizer.get_local_fp32_param(parameter, key).clone()
            elif value.shape == flat.shape:
                mine = value.narrow(0, start, count)
                result[key] = mine if self.stage else mine.view(parameter.shape)
            else:
                result[key] = value
        return result

    def _group_flat(self, parameter: Any) -> Tensor:
        """Below stage 3: this rank's float32 partition of a parameter's group."""
        optimizer = self.optimizer
        flats: Sequence[Tensor] = (
            optimizer.fp32_groups_flat_partition  # of the optimizer for bf16 that adds gradients up in float32
            if hasattr(optimizer, "fp32_groups_flat_partition")
            else optimizer.single_partition_of_fp32_groups
        )
        return flats[self._group_of[id(parameter)]]

    def optimizer_state(self, models: Sequence[nn.Module | NamedModel]) -> dict[str, Any]:
        """The optimizer's state by parameter name; leaves as in `model_state`."""
        state: dict[str, Any] = {}
        names = self.names(models)
        for group, group_names in zip(self._given, names, strict=True):
            for parameter, name in zip(group, group_names, strict=True):
                found = self._states(parameter) if self._is_trained(parameter) else {}
                if found:
                    share = self.share(parameter)
                    state[name] = {key: self._leaf_of(share, value) for key, value in found.items()}
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.base.param_groups
        ]
        kept = [group_names for group_names in names if group_names]  # the engine drops empty groups
        groups = [
            {**mine, "params": list(group_names)} for mine, group_names in zip(options, kept, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _leaf_of(self, share: Share, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (
            value.dim() == 0
        ):  # such as the step: the engine has one for a group, other optimizers one for each parameter
            return value.clone()
        return value if self.stage == 0 else share.parts(value)

    def _names_there(self, names: Sequence[Sequence[str]], tree: Mapping[str, Any]) -> list[list[str]]:
        """Names of groups without frozen parameters that the state does not list, as DeepSpeed's own do not."""
        trained = [[*map(self._is_trained, given)] for given in self._given if given]
        return names_to_find(names, trained, tree["param_groups"])

    def check_optimizer_state(
        self, tree: Mapping[str, Any], models: Sequence[nn.Module | NamedModel]
    ) -> None:
        """Check that `load_optimizer_state` can load a state; changes nothing.

        Raises:
            StateMismatchError: the parameters or their groups differ.
        """
        check_groups(self._names_there(self.names(models), tree), tree)

    def load_optimizer_state(self, tree: Mapping[str, Any], models: Sequence[nn.Module | NamedModel]) -> None:
        """Load what `optimizer_state` returned, or the state of a plain optimizer of the same parameters."""
        names = self.names(models)
        saved = {frozenset(group["params"]): group for group in tree["param_groups"] if group["params"]}
        kept = [group for group in names if group]
        for group, group_names in zip(self.base.param_groups, self._names_there(kept, tree), strict=True):
            options = saved.get(frozenset(group_names), {})  # the state may lack a group that is frozen here
            group.update({key: value for key, value in options.items() if key != "params"})
        with torch.no_grad():
            for group_parameters, group_names in zip(self._given, names, strict=True):
                for parameter, name in zip(group_parameters, group_names, strict=True):
                    if self._is_trained(parameter):
                        self._load_states(parameter, tree["state"].get(name, {}))

    def _load_states(self, parameter: Any, saved: Mapping[str, Any]) -> None:
        share, found = self.share(parameter), self._flat_of(parameter)
        if self.stage == 0 and found is None:
            owner = self._masters.get(id(parameter), parameter)
            self.base.state[owner] = {
                key: _read(value, owner) if _is_tensor(value) and len(value.shape) else _single(value)
                for key, value in saved.items()
            }
            return
        flat = found[0] if found is not None else self._group_flat(parameter)
        state = self.base.state[flat]
        for key, value in saved.items():
            if not _is_tensor(value) or not len(value.shape):
                state[key] = _single(value)
                continue
            if tuple(value.shape) != share.shape:
                raise StateMismatchError(
                    f"the saved optimizer state {key!r} has the shape {list(value.shape)}, and its parameter "
                    f"{list(share.shape)}; DeepSpeed's flat partitions hold only states of the parameter's shape"
                )
            if found is None or not share.count:
                if key not in state:
                    state[key] = torch.zeros_like(flat, dtype=value.dtype)
                continue
            _, start, count = found
            if self._swapped():
                mine = torch.zeros(count, dtype=value.dtype)
                _fill(share.parts(mine), value)
                self.optimizer.set_local_hp_param(mine, parameter, key)
                continue
            if key not in state:
                state[key] = torch.zeros_like(flat, dtype=value.dtype)
            _fill(share.parts(state[key].narrow(0, start, count)), value)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | SavedTensor)


def _single(value: Any) -> Any:
    if isinstance(value, SavedTensor):
        return value.read()
    return value.clone() if isinstance(value, Tensor) else value


def _read(value: Any, like: Tensor) -> Tensor:
    whole: Tensor = value.read() if isinstance(value, SavedTensor) else value.clone()
    return whole.to(like.device)


def _fill(target: Leaf, value: Any) -> None:
    if isinstance(value, SavedTensor):
        fill_all([(value, target)])
    else:
        fill_part(target, value)


def _free_gathered(model: nn.Module) -> None:
    """Let small parameters that the engine keeps gathered be gathered again, from the new parts."""
    for parameter in _parameters(model):
        if getattr(parameter, "ds_persist", False):
            parameter.partition()
            parameter.all_gather()


def _parameters(model: nn.Module) -> Iterator[Any]:
    yield from model.parameters()
