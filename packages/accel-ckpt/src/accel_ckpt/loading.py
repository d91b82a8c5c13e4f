"""Loading weights into a model on one device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from accel_ckpt import hub
from accel_ckpt.convert.sources import find_source, open_pieces
from accel_ckpt.coordination import Coordinator, SingleProcess, default_coordinator, run_together
from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError, UninitializedTensorError
from accel_ckpt.index import WeightFiles
from accel_ckpt.modules.tensors import check_nothing_on_meta, get_non_persistent_buffers, rewrap
from accel_ckpt.modules.ties import parent_and_leaf
from accel_ckpt.names import canonical_state_dict
from accel_ckpt.reader import MappedShard, read_pickled, read_pickled_weights
from accel_ckpt.tensors import is_lazy, parse_dtype
from accel_state.errors import NotAvailableError
from accel_state.process import PartialState

__all__ = ["LoadReport", "WeightSource", "load_checkpoint_in_model", "load_state_dict", "open_weights"]

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load left open."""

    missing: tuple[str, ...] = ()
    """Names of the model that the checkpoint does not have and that are not tied to one it has."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the model does not have."""
    mismatched: tuple[str, ...] = ()
    """Names with another shape, each as ``name: (shape in the checkpoint) instead of (shape in the model)``; with a
    dtype that cannot be converted without loss of meaning (complex to real, floating to integer); or with other
    values than a name that the model ties with it.
    """


class WeightSource(Protocol):
    """Tensors of a checkpoint by name; shapes are known before anything is read."""

    @property
    def about(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor."""

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU; a private view of the mapped file where possible."""


class _MappedWeights:
    def __init__(self, files: WeightFiles) -> None:
        self.homes: dict[str, tuple[MappedShard | dict[str, torch.Tensor], str]] = {}
        for path in files.files:
            for name, home in _open_file(path):
                if files.weight_map is None or files.weight_map.get(name, path) == path:
                    self.homes[name] = (home[0], home[1])
        absent = sorted(name for name in files.weight_map or () if name not in self.homes)
        if absent:
            raise CorruptCheckpointError(
                f"the index says that {', '.join(absent)} are in {', '.join(map(str, files.files))}, but "
                f"they are not"
            )
        self.about = {name: _about(shard, key) for name, (shard, key) in self.homes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        shard, key = self.homes[name]
        return shard.tensor(key) if isinstance(shard, MappedShard) else shard[key]


def _open_file(path: Path) -> list[tuple[str, tuple[Any, str]]]:
    if path.suffix == ".safetensors":
        shard = MappedShard(path)
        names = {**{name: name for name in shard.header.entries}, **shard.header.aliases}
        return [(name, (shard, key)) for name, key in names.items()]
    content = read_pickled_weights(path)
    return [(name, (content, name)) for name in content]


def _about(shard: MappedShard | dict[str, torch.Tensor], key: str) -> tuple[torch.Size, torch.dtype]:
    if isinstance(shard, MappedShard):
        entry = shard.header.entries[key]
        return torch.Size(entry.shape), entry.dtype
    return shard[key].shape, shard[key].dtype


class _BroadcastWeights:
    """The weights that rank 0 has opened; every ``tensor`` is a collective."""

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        coordinator: Coordinator,
        revision: str | None,
        token: str | bool | None,
    ) -> None:
        self.opened: WeightSource | None = None

        def open_on_rank_0() -> Any:
            if coordinator.rank == 0:
                self.opened = open_weights(checkpoint, revision=revision, token=token)
                return dict(self.opened.about)
            return None

        told = run_together(open_on_rank_0, coordinator, doing=f"opening the checkpoint {checkpoint}")
        self.about: Mapping[str, tuple[torch.Size, torch.dtype]] = told[0]

    def tensor(self, name: str) -> torch.Tensor:
        import torch.distributed as dist

        from accel_state.collectives import broadcast

        shape, dtype = self.about[name]
        on_host = "gloo" in dist.get_backend() or "mpi" in dist.get_backend()
        device = torch.device("cpu") if on_host else PartialState().device
        value = (
            self.opened.tensor(name).to(device)
            if self.opened is not None
            else torch.empty(shape, dtype=dtype, device=device)
        )
        received: torch.Tensor = broadcast(value)
        return received


def open_weights(
    checkpoint: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None
) -> WeightSource:
    """Open the weights of a file, an index or a folder; headers are read and checked, tensors are not read
    yet.

    Folders of torch's Distributed Checkpoint are read too, also where Accelerate put one.

    Args:
        checkpoint: what to open. A string ``org/name`` is a repository of a hub if there is no such local path.
        revision: of the repository: branch, tag or commit.
        token: for a private repository; by default the one that was logged in with.
    """
    if hub.is_repo_id(checkpoint) and not Path(checkpoint).exists():
        checkpoint = hub.fetch_weights(str(checkpoint), revision, token)
    elif revision is not None or token is not None:
        raise ValueError(
            f"revision and token are for repositories of a hub, and {os.fspath(checkpoint)!r} is local; leave them out"
        )
    source = find_source(Path(checkpoint))
    return _MappedWeights(source) if isinstance(source, WeightFiles) else open_pieces(source)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, torch.Tensor]:
    """Load one file of weights, safetensors or ``.bin``.

    Args:
        checkpoint_file: the file. Without code being run from it.
        device_map: for safetensors: module name → device; ``""`` is the whole model. Names that it does not
            cover, and ``"disk"``, stay on the CPU.

    Returns:
        Names to tensors, tied names included. On the CPU the tensors of a safetensors file are private views
        of it.
    """
    path = Path(checkpoint_file).expanduser()
    if path.suffix != ".safetensors":
        content = read_pickled(path)
        return dict(content) if isinstance(content, Mapping) else content
    source = _MappedWeights(WeightFiles((path,)))
    kind = MappedShard(path).header.metadata.get("format")
    if kind is None:
        warnings.warn(
            f"{path} does not say which framework wrote it; it is read as written by PyTorch", stacklevel=2
        )
    elif kind != "pt":
        raise CorruptCheckpointError(f"{path} was written for the framework {kind!r}; only 'pt' is read here")
    loaded: dict[tuple[str, torch.device | None], torch.Tensor] = {}
    result = {}
    for name, (_, key) in source.homes.items():
        tensor = source.tensor(key)
        device = _device_of(name, device_map or {})
        result[name] = loaded.setdefault((key, device), tensor.to(device) if device is not None else tensor)
    return result


def _device_of(name: str, device_map: DeviceMap) -> torch.device | None:
    best = max(
        (key for key in device_map if key == "" or name == key or name.startswith(key + ".")),
        key=len,
        default=None,
    )
    return None if best is None or device_map[best] == "disk" else torch.device(device_map[best])


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool | None = None,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> LoadReport:
    """Load weights into a model that is on one device, or on none yet.

    Everything is compared before anything is changed. A parameter that has values keeps its identity, so
    optimizers that hold it stay valid; one on the meta device becomes real: on the CPU a private view of the
    file, without a copy. Names are compared in canonical form.

    Args:
        model: changed in place.
        checkpoint: a file, an index, or a folder with ``model.safetensors``, ``pytorch_model.bin`` or an
            index, or of a distributed checkpoint. A string ``org/name`` that is no local path is a repository
            of a hub, whose weights are downloaded to huggingface_hub's cache.
        device_map: ``None``: every tensor stays on its device, those without one go to the CPU. ``{"":
            device}``: all go there, buffers that no checkpoint holds included.
        offload_folder: for maps with several devices; accel-bigmodel's.
        dtype: floating tensors become this dtype. Without it they take the dtype of the model's tensor.
        offload_state_dict: for maps with several devices; accel-bigmodel's.
        offload_buffers: for maps with several devices; accel-bigmodel's.
        keep_in_fp32_modules: with ``dtype`` float16, tensors with one of these in their name, between dots,
            become float32.
        offload_8bit_bnb: for maps with several devices; accel-bigmodel's.
        strict: ``None``: a missing name or another shape is an error, an unexpected name a warning. ``True``:
            all are errors. ``False``: all are reported by a warning, and what matches is loaded. A name that
            is tied to one that is present is never missing.
        full_state_dict: ``False`` (per-rank shards) is not available for plain modules.
        broadcast_from_rank0: rank 0 reads and sends every tensor to the others, which need not see the files.
            Collective.
        revision: of the repository: branch, tag or commit.
        token: for a private repository; by default the one that was logged in with.

    Returns:
        What was missing, unexpected or of another shape.

    Raises:
        StateMismatchError: as ``strict`` says; names every name.
        UninitializedTensorError: a tensor would stay without values, unless ``strict=False``.
        CorruptCheckpointError: a file is truncated, or its header does not describe it.
        UnsafeCheckpointError: a file would run code, or a name in the index leaves the folder.
        NotAvailableError: an option that needs several devices; names the package that has it.
    """
    device = _single_device(device_map)
    offload = {
        "offload_folder": offload_folder,
        "offload_state_dict": offload_state_dict,
        "offload_buffers": offload_buffers,
        "offload_8bit_bnb": offload_8bit_bnb,
    }
    if used := [name for name, value in offload.items() if value and name != "offload_folder"]:
        raise NotAvailableError(
            f"{', '.join(used)}: offloading needs load_checkpoint_in_model of accel-bigmodel"
        )
    if not full_state_dict:
        raise NotAvailableError(
            "full_state_dict=False loads the shards of each rank, which plain modules do not have; leave it "
            "at True"
        )
    wanted = None if dtype is None else parse_dtype(dtype)

    def dtype_for(name: str, old: torch.Tensor, new: torch.Tensor) -> torch.dtype:
        if not new.dtype.is_floating_point:
            return old.dtype if wanted is None else new.dtype
        if wanted == torch.float16 and any(part in (keep_in_fp32_modules or ()) for part in name.split(".")):
            return torch.float32
        return wanted or old.dtype

    coordinator = default_coordinator() if broadcast_from_rank0 else SingleProcess()
    source: WeightSource
    source = (
        _BroadcastWeights(checkpoint, coordinator, revision, token)
        if coordinator.world_size > 1
        else open_weights(checkpoint, revision=revision, token=token)
    )
    targets = _targets(model)
    report, steps = _compare(source, targets)
    run_together(lambda: _judge(report, checkpoint, strict), coordinator, doing=f"loading {checkpoint}")
    _fill(model, source, steps, device, dtype_for)
    if device is not None:
        _move_rest(model, device)
    if strict is not False:
        check_nothing_on_meta(model)
    return report


def _single_device(device_map: DeviceMap | None) -> torch.device | None:
    if device_map is None:
        return None
    if set(device_map) != {""} or device_map[""] == "disk":
        raise NotAvailableError(
            f"the device map {dict(device_map)!r} places parts of the model, or puts it on disk; that is "
            f"what "
            "load_checkpoint_in_model of accel-bigmodel is for (pip install accel-bigmodel). Here: None or "
            '{"": device}'
        )
    return torch.device(device_map[""])


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the model and all its names there."""

    tensor: torch.Tensor
    names: tuple[str, ...]


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Every tensor that a state dict of the model holds, by canonical name; tied names share a target."""
    hidden = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    tensors |= {name: b for name, b in model.named_buffers(remove_duplicate=False) if name not in hidden}
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise UninitializedTensorError(
                f"{name!r} of the model is lazy and has no shape yet; run the model once before loading"
            )
        if tensor.device.type != "meta" and torch._debug_has_internal_overlap(tensor) == 1:
            raise StateMismatchError(
                f"{name!r} of the model is expanded, so that elements share memory and cannot be loaded one by one; "
                "clone() it when the model is built"
            )
        groups.setdefault(id(tensor), []).append(name)
    shared = {key: _Target(tensors[names[0]], tuple(names)) for key, names in groups.items()}
    return canonical_state_dict({name: shared[id(tensor)] for name, tensor in tensors.items()}, model)


def _compare(
    source: WeightSource, targets: Mapping[str, _Target]
) -> tuple[LoadReport, list[tuple[str, _Target]]]:
    names = _names_as_in(source.about, targets)
    mismatched, steps, provided = [], [], set()
    filled: dict[int, str] = {}
    for raw, name in names.items():
        target = targets.get(name)
        if target is None:
            continue
        shape, dtype = source.about[raw]
        provided.add(id(target))
        if shape != target.tensor.shape:
            mismatched.append(f"{name}: {tuple(shape)} instead of {tuple(target.tensor.shape)}")
        elif _loses_values(dtype, target.tensor.dtype):
            mismatched.append(f"{name}: {dtype} instead of {target.tensor.dtype}")
        elif id(target) not in filled:
            filled[id(target)] = raw
            steps.append((raw, target))
        elif not torch.equal(source.tensor(raw), source.tensor(filled[id(target)])):
            mismatched.append(f"{name}: other values than {filled[id(target)]}, with which the model ties it")
    missing = [name for name, target in targets.items() if id(target) not in provided]
    unexpected = [raw for raw, name in names.items() if name not in targets]
    return LoadReport(tuple(missing), tuple(unexpected), tuple(mismatched)), steps


def _loses_values(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether conversion would drop imaginary parts, or what stands behind the point; masks may become bool."""
    if saved.is_complex:
        return not wanted.is_complex
    return saved.is_floating_point and not (
        wanted.is_floating_point or wanted.is_complex or wanted == torch.bool
    )


def _names_as_in(source: Iterable[str], targets: Mapping[str, Any]) -> dict[str, str]:
    names = {name: name for name in source}
    if all(name in targets for name in names):
        return names
    names = {name: new for new, name in canonical_state_dict(names).items()}
    if (
        names
        and all(name.startswith("module.") for name in names.values())
        and not any(n in targets for n in names.values())
    ):
        # Written from inside DistributedDataParallel by a program that kept its prefix.
        names = {raw: name.removeprefix("module.") for raw, name in names.items()}
    return names


def _judge(report: LoadReport, checkpoint: object, strict: bool | None) -> None:
    kinds = {
        "missing": ("is not in the checkpoint", report.missing),
        "mismatched": ("has another shape, kind of dtype or value", report.mismatched),
        "unexpected": ("is not in the model", report.unexpected),
    }
    fatal = {True: {*kinds}, None: {"missing", "mismatched"}, False: set[str]()}[strict]
    errors = [
        f"{what}: {', '.join(names)}" for kind, (what, names) in kinds.items() if names and kind in fatal
    ]
    if errors:
        raise StateMismatchError(
            f"{checkpoint} does not fit the model; "
            + "; ".join(errors)
            + ". Nothing was changed; strict=False loads what matches and reports the rest"
        )
    for kind, (what, names) in kinds.items():
        if names and kind == "unexpected":
            warnings.warn(
                f"Some weights of the model checkpoint {checkpoint} were not used, because the model has no "
                f"tensors of "
                f"these names: {', '.join(names)}",
                stacklevel=3,
            )
        elif names:
            warnings.warn(
                f"{checkpoint} does not fill the whole model; {what}: {', '.join(names)}", stacklevel=3
            )


def _fill(
    model: nn.Module,
    source: WeightSource,
    steps: Sequence[tuple[str, _Target]],
    device: torch.device | None,
    dtype_for: Callable[[str, torch.Tensor, torch.Tensor], torch.dtype],
) -> None:
    taken: set[int] = set()  # memory that a tensor of the model already uses as its own
    for raw, target in steps:
        old = target.tensor
        value = source.tensor(raw).detach()
        home = device or (old.device if old.device.type != "meta" else torch.device("cpu"))
        dtype = dtype_for(target.names[0], old, value)
        if (old.device, old.dtype) == (home, dtype):
            with torch.no_grad():
                old.copy_(value)
            continue
        new = value.to(home, dtype)
        if new.numel() and new.data_ptr() in taken:
            new = new.clone()
        taken.add(new.data_ptr())
        if old.device.type == "meta":
            _assign(model, target, new)
        else:
            old.data = new


def _assign(model: nn.Module, target: _Target, value: torch.Tensor) -> None:
    wrapped = rewrap(target.tensor, value) if isinstance(target.tensor, nn.Parameter) else value
    for name in target.names:
        owner, leaf = parent_and_leaf(model, name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = wrapped  # type: ignore[assignment]
        else:
            owner._buffers[leaf] = wrapped


def _move_rest(model: nn.Module, device: torch.device) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and tensor.device != device:
            tensor.data = tensor.data.to(device)
