"""Weights that the modules of a model translate, by their ``_load_from_state_dict`` and hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.loading.load_targets import LoadTarget, ModelTensors, assign
from accel_ckpt.loading.weights import Pair, TensorInfo, WeightSource
from accel_ckpt.modules.names import by_prefix, is_of_torch_nn, loads_by_itself
from accel_ckpt.modules.versions import renamed_versions, versions_at, with_versions
from accel_ckpt.parts import is_sharded
from accel_ckpt.tensor_storage import as_bytes, flat_bytes

__all__ = ["Translation", "translating_modules"]

Prefixed = tuple[str, str, nn.Module]

# Every byte of memory that a module has to fill; what still consists of it was not filled.
_UNFILLED = 0xA5


def translating_modules(tensors: ModelTensors, names: Mapping[str, str]) -> list[Prefixed]:
    """Find the topmost modules that override how torch's modules load a state dict, or whose children may.

    Modules of ``torch.nn`` translate older forms, such as those of BatchNorm and weight norm; they are left out if the
    names are already those of the module.

    Args:
        tensors: tensors of the model.
        names: names in the checkpoint → canonical names.
    """
    found: list[Prefixed] = []
    saved: dict[str, set[str]] | None = None
    wanted: dict[str, set[str]] = {}
    for prefix, canonical, module in tensors.modules:
        if _is_ordinary(module) or (found and prefix.startswith(found[-1][0])):
            continue
        if not loads_by_itself(module, also_torch=True):
            continue
        if is_of_torch_nn(module):
            if saved is None:
                saved, wanted = _by_parent(names.values()), _by_parent(tensors.targets)
            parent = canonical.rstrip(".")
            if saved.get(parent) == wanted.get(parent):
                continue
        found.append((prefix, canonical, module))
    return found


def _is_ordinary(module: nn.Module) -> bool:
    """The quick answer for nearly all modules."""
    kind = type(module)
    return (
        kind._load_from_state_dict is nn.Module._load_from_state_dict
        and kind.load_state_dict is nn.Module.load_state_dict
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
    )


def _by_parent(names: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        found.setdefault(parent, set()).add(leaf)
    return found


class Translation:
    """Weights of a checkpoint, some of them as the modules of a model translate them.

    A hook sees the state dict below its module, whose tensors are those of the checkpoint: views of the file where they
    are mapped. A module with a ``_load_from_state_dict`` of its own fills its own tensors; those on the meta device get
    memory before, on the CPU. :meth:`undo` gives back what was there.

    Args:
        source: the weights as they are saved.
        names: of the checkpoint: as they are there → canonical.
        tensors: of the model.
        tops: as `translating_modules` gives them.
        strict: as for loading.
    """

    def __init__(
        self,
        source: WeightSource,
        names: Mapping[str, str],
        tensors: ModelTensors,
        tops: Sequence[Prefixed],
        strict: bool | None,
    ) -> None:
        self._base, self._tensors, self._tops, self._strict = source, tensors, tops, strict
        self.objects: dict[str, Any] = {names[raw]: value for raw, value in source.objects.items()}
        self.errors: list[str] = []
        """Errors that modules reported, besides names that are missing or unexpected."""
        self.versions = renamed_versions(source.versions, names)
        self._raw = {canonical: raw for raw, canonical in names.items() if raw not in source.objects}
        self._values: dict[str, torch.Tensor] = {}
        self._made: set[str] = set()  # names of values that are no tensors of the checkpoint
        self._undo: list[Callable[[], None]] = []
        self._canonical = {prefix: canonical for prefix, canonical, _ in tensors.modules}
        self._own = {canonical: prefix for prefix, canonical, _ in tensors.modules}
        self._fetched: dict[
            int, tuple[str, int]
        ] = {}  # identity of a tensor → its name in the checkpoint, version
        self._lent: dict[
            str, Callable[[], None]
        ] = {}  # names of tensors without values → what takes memory back
        self.about: Mapping[str, TensorInfo] = {}

    # What modules do

    def run(self) -> None:
        """Let the modules translate. Tensors for which they have no values are missing in `about` afterwards."""
        below = [name for name in self._raw if self._is_below(name)]
        shared = {id(self._tensors.targets[name]) for name in below if name in self._tensors.targets}
        beside = [
            name for name in self._raw.keys() - set(below) if id(self._tensors.targets.get(name)) in shared
        ]
        read = self._read([*below, *sorted(beside)])
        self._values = {name: read[name] for name in beside}
        entries = {**{name: read[name] for name in below}, **self.objects}
        for prefix, _, module in self._tops:
            state = OrderedDict((self._own_name(name), value) for name, value in entries.items())
            state = OrderedDict((name, value) for name, value in state.items() if name.startswith(prefix))
            for name in state:
                self.objects.pop(by_prefix(name, self._canonical), None)
            if not prefix and not type(module).load_state_dict.__module__.startswith("torch."):
                self._load_whole(module, state)
            else:
                self._load(module, state, prefix)
        done = set(below)
        rest = {name: self._base.about[raw] for name, raw in self._raw.items() if name not in done}
        self.about = {**rest, **self._values}

    def _is_below(self, name: str) -> bool:
        return any(name.startswith(canonical) for _, canonical, _ in self._tops)

    def _own_name(self, name: str) -> str:
        return by_prefix(name, self._own)

    def _read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        raw = [self._raw[name] for name in names]
        self._base.begin(raw)
        try:
            read = {name: self._base.tensor(old) for name, old in zip(names, raw, strict=True)}
        finally:
            self._base.finish()  # other ranks wait for this one's part
        self._fetched = {id(value): (self._raw[name], value._version) for name, value in read.items()}
        self._kept = read  # so that identities stay theirs
        return read

    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Load a module and its children as torch's ``load_state_dict`` does."""
        self._undo.append(_restoring_attributes(module))
        if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
            self._load_by_itself(module, state, prefix)
        else:
            missing: list[str] = []
            unexpected: list[str] = []
            with torch.no_grad():
                for hook in [*module._load_state_dict_pre_hooks.values()]:
                    hook(state, prefix, self._said_of(prefix), True, missing, unexpected, self.errors)
            for name in [*state]:
                if name.startswith(prefix) and not self._is_of_child(module, name[len(prefix) :]):
                    self._take(name, state[name])
        for name, child in module._modules.items():
            if child is not None:
                inside = f"{prefix}{name}."
                self._load(child, {k: v for k, v in state.items() if k.startswith(inside)}, inside)

    def _said_of(self, prefix: str) -> dict[str, Any]:
        """The ``local_metadata`` that torch passes to a module: the version of its state dict, where that is known."""
        version = self.versions.get(self._canonical[prefix].rstrip("."))
        return {} if version is None else {"version": version}

    def _is_of_child(self, module: nn.Module, name: str) -> bool:
        first, dot, _ = name.partition(".")
        return bool(dot) and module._modules.get(first) is not None

    def _take(self, name: str, value: Any) -> None:
        canonical = by_prefix(name, self._canonical)
        if not isinstance(value, torch.Tensor):
            self.objects[canonical] = value
            return
        self._values[canonical] = value
        fetched = self._fetched.get(id(value))
        if fetched is None or value._version != fetched[1]:
            self._made.add(canonical)
        else:
            self._raw[canonical] = fetched[0]

    def _load_by_itself(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Let a module fill its own tensors."""
        own: list[tuple[str, torch.Tensor | None]] = [*module._parameters.items()]
        own += [pair for pair in module._buffers.items() if pair[0] not in module._non_persistent_buffers_set]
        held = [prefix + leaf for leaf, tensor in own if tensor is not None]
        # Those of torch add values for tensors without any, and take values as they are: views stay views.
        by_torch = type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        takes = by_torch and all(_tensor_at(module, name[len(prefix) :]).is_meta for name in held)
        undo = self._give_memory(module, held, takes)
        metadata = self._said_of(prefix)
        if takes:
            metadata["assign_to_params_buffers"] = True
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        with torch.no_grad():
            module._load_from_state_dict(state, prefix, metadata, True, missing, unexpected, errors)
        if errors:
            undo()
            self.errors += errors
            return
        self._undo.append(undo)
        if f"{prefix}_extra_state" not in missing:  # it was set
            self._tensors.extra.pop(by_prefix(f"{prefix}_extra_state", self._canonical), None)
        self._take_filled(module, prefix, held, missing)
        for name in unexpected:
            if name not in held and name in state and not self._is_of_child(module, name[len(prefix) :]):
                self._take(name, state[name])

    def _load_whole(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Let a model load its whole state dict by its own ``load_state_dict``."""
        own = [self._own_name(name) for name in self._tensors.targets]
        self._undo += [_restoring_attributes(module) for _, _, module in self._tensors.modules]
        self._undo.append(self._give_memory(model, own))
        options = {"strict": False} if self._strict is False else {}
        try:
            state = with_versions(state, versions_at(self.versions, self._own))
            answer = model.load_state_dict(state, **options)
        except RuntimeError as error:
            raise StateMismatchError(
                f"{type(model).__name__}.load_state_dict refuses the weights: {error}"
            ) from error
        self._tensors.extra.clear()  # it was set
        self._take_filled(model, "", own, list(getattr(answer, "missing_keys", ())))

    def _take_filled(
        self, module: nn.Module, prefix: str, held: Sequence[str], missing: Sequence[str]
    ) -> None:
        lacking = set(missing)
        for name in held:
            tensor = _tensor_at(module, name[len(prefix) :])
            was_empty = self._lent.get(name)
            if name not in lacking and (was_empty is None or _is_filled(tensor)):
                canonical = by_prefix(name, self._canonical)
                self._values[canonical] = tensor
                self._made.add(canonical)
                target = self._tensors.targets.get(canonical)
                if target is not None and target.tensor is not tensor:  # the module has replaced it
                    target.tensor = tensor
                    target.hold(tensor)
            elif was_empty is not None:
                was_empty()  # without values, as it was

    def _give_memory(
        self, module: nn.Module, names: Sequence[str], takes: bool = False
    ) -> Callable[[], None]:
        """Memory for tensors on the meta device, unless the module takes others; returns what undoes it."""
        self._lent = {}
        back: list[Callable[[], None]] = []
        for name in names:
            target = self._tensors.targets.get(by_prefix(name, self._canonical))
            if target is None:
                continue
            if is_sharded(target.tensor):
                raise StateMismatchError(
                    f"{name!r} is divided among ranks (DTensor), and {type(module).__name__} translates its state dict "
                    "by itself, which needs whole tensors: load the weights before the model is divided. Nothing was "
                    "changed"
                )
            if target.tensor.is_meta:
                self._lent[name] = _restoring_tensor(target) if takes else _lend(target)
                back.append(self._lent[name])
            else:
                back.append(_restoring_values(target))

        def undo() -> None:
            for step in back:
                step()

        return undo

    def undo(self) -> None:
        """Give modules back what they had, as far as it is tensors, or held by attributes."""
        for step in reversed(self._undo):
            step()
        self._undo.clear()

    def after(self, missing: Sequence[str], unexpected: Sequence[str]) -> tuple[list[str], list[str]]:
        """Call the hooks for after a load; returns which names they leave as missing and unexpected."""
        keys = _IncompatibleKeys([*missing], [*unexpected])
        for module in self._hooked():
            for hook in [*module._load_state_dict_post_hooks.values()]:
                hook(module, keys)
        return [*keys.missing_keys], [*keys.unexpected_keys]

    @property
    def is_judged_after(self) -> bool:
        """Whether hooks decide after the load what is missing."""
        return any(module._load_state_dict_post_hooks for module in self._hooked())

    def _hooked(self) -> Iterator[nn.Module]:
        for prefix, _, module in self._tops:
            if prefix or type(module).load_state_dict.__module__.startswith("torch."):
                yield from _children_first(module)

    # As weights

    @property
    def fingerprint(self) -> str:
        """Identifies the files, and the tensors that modules made."""
        if not self._made:
            return self._base.fingerprint
        hashed = xxhash.xxh3_128(self._base.fingerprint.encode())
        for name in sorted(self._made):
            hashed.update(name.encode())
            hashed.update(as_bytes(self._values[name].detach().cpu().contiguous()))
        return hashed.hexdigest()

    def is_mapped(self, name: str) -> bool:
        """Whether a tensor is a view of a file, as it is there."""
        return name not in self._made and self._base.is_mapped(self._raw[name])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; what a module has filled itself is its own tensor, on its device."""
        value = self._values.get(name)
        return self._base.tensor(self._raw[name]) if value is None else value

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """The pairs of names whose values differ."""
        here = [pair for pair in pairs if all(name in self._values for name in pair)]
        there = {
            (self._raw[first], self._raw[second]): (first, second)
            for first, second in pairs
            if (first, second) not in here
        }
        found = {there[pair] for pair in self._base.differing([*there])}
        return found | {pair for pair in here if not _are_equal(*(self._values[name] for name in pair))}

    def begin(self, names: Sequence[str]) -> None:
        """Announce the tensors that will be read."""
        self._base.begin([self._raw[name] for name in names if name not in self._values])

    def finish(self) -> None:
        """End the reading."""
        self._base.finish()


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    a, b = a.detach().cpu(), b.detach().cpu()
    wide = torch.promote_types(a.dtype, b.dtype)
    narrow = a.dtype if a.dtype.itemsize <= b.dtype.itemsize else b.dtype
    dtype = narrow if wide.is_floating_point else wide
    return a.shape == b.shape and torch.allclose(a.to(dtype), b.to(dtype), rtol=0, atol=0, equal_nan=True)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    if loads_by_itself(module):
        yield module


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    found = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
    assert found is not None, "it was a tensor before"
    return found


def _is_filled(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.is_meta:
        return not tensor.is_meta
    return bool((flat_bytes(tensor.detach().cpu().contiguous()) != _UNFILLED).any())


def _lend(target: LoadTarget) -> Callable[[], None]:
    """Give memory on the CPU to a tensor without values; returns what takes it back."""
    old = target.tensor
    memory = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    memory.view(-1).view(torch.uint8).fill_(_UNFILLED)
    assign(target, memory)
    leaf = target.names[0].rpartition(".")[2]
    undo = _restoring_tensor(target)
    target.tensor = target.owners[0][leaf]
    return undo


def _restoring_tensor(target: LoadTarget) -> Callable[[], None]:
    old = target.tensor

    def undo() -> None:
        target.tensor = old
        target.hold(old)

    return undo


def _restoring_values(target: LoadTarget) -> Callable[[], None]:
    old: Any = target.tensor
    values = target.tensor.detach().to("cpu", copy=True)
    attributes = dict(old.__dict__)

    def undo() -> None:
        with torch.no_grad():
            old.copy_(values)
        old.__dict__.clear()
        old.__dict__.update(attributes)
        target.tensor = old
        target.hold(old)

    return undo


def _restoring_attributes(module: nn.Module) -> Callable[[], None]:
    attributes = dict(module.__dict__)

    def undo() -> None:
        module.__dict__.clear()
        module.__dict__.update(attributes)

    return undo
