"""Loading a checkpoint to many devices, host memory and disk."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import Sizes
from accel_bigmodel.device_maps.checks import check_all_have_values, check_device_map, execution_device
from accel_bigmodel.device_maps.infer import resolve_device_map
from accel_bigmodel.dispatch import dispatch_model, memory_sizes
from accel_bigmodel.errors import DeviceMapError, OffloadError
from accel_bigmodel.offload_cache import CacheFile, OffloadCache, check_folder
from accel_ckpt.coordination import do_together
from accel_ckpt.loading.load_model import (
    LoadReport,
    Placer,
    Request,
    Step,
    Target,
    assign,
    converted,
    load_weights,
)
from accel_ckpt.loading.weights import WeightSource
from accel_ckpt.modules.names import listed
from accel_state import environment
from accel_state.errors import NotAvailableError
from accel_state.world.topology import detect

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

Device = int | str | torch.device
Model = TypeVar("Model", bound=nn.Module)

CPU = torch.device("cpu")

# Seconds that a load may take before it shows how far it is; most are over by then, because nothing is moved.
_PATIENCE = 1.0


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: str | Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool | None = None,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool = True,
) -> LoadReport:
    """Load weights into a model, each tensor to where a device map puts it.

    The map, the names, shapes and dtypes are checked before a tensor is read or the model changed. Tensors on the host
    become private views of mapped safetensors files: nothing is copied, and pages are read when they are touched. Those
    of ``.bin`` files are read. What is on ``"disk"`` stays there: in the safetensors file that it is in, or, if that is
    none or has another dtype, in a file that is written to ``offload_folder`` once and found there by the next load.

    Args:
        model: changed in place; parameters that have values keep their identity.
        checkpoint: a file, an index, or a folder with ``model.safetensors``, ``pytorch_model.bin`` or an index, or of a
            distributed checkpoint. A string ``org/name`` that is no local path is a repository of a hub, whose weights
            are downloaded to huggingface_hub's cache.
        device_map: name of a module or tensor → index of an accelerator, a device, ``"cpu"`` or ``"disk"``; ``""`` is
            the whole model. ``"meta"``: these are not read by this process. ``None``: every tensor stays on its
            device, those without one go to the CPU.
        offload_folder: for tensors on ``"disk"`` that are not in a safetensors file as they are needed.
        dtype: floating tensors become this dtype. Without it they take the dtype of the model's tensor.
        offload_state_dict: either way there is never a state dict in memory that could be offloaded: tensors go one by
            one from the file to where they go.
        offload_buffers: buffers on ``"disk"`` that are in no safetensors file are written to ``offload_folder`` like
            parameters, instead of staying in memory.
        keep_in_fp32_modules: with ``dtype`` float16, tensors with one of these in their name, between dots, become
            float32.
        offload_8bit_bnb: not available: ``load_and_quantize_model`` quantises what it loads.
        strict: ``None``: a missing name or another shape is an error, an unexpected name a warning. ``True``: all are
            errors. ``False``: all are reported by a warning, and what matches is loaded. A name that is tied to one
            that is present is never missing.
        full_state_dict: ``False`` (per-rank shards) is not available for plain modules.
        broadcast_from_rank0: rank 0 reads, and sends what any rank needs; the others need not see the files. Their maps
            may differ. Collective.
        revision: of the repository: branch, tag or commit.
        token: for a private repository; by default the one that was logged in with.
        progress: show a bar once a load has taken a second, on the first process of each node.

    Returns:
        What was missing, unexpected or of another shape.

    Raises:
        DeviceMapError: the map does not cover the model, names something that is not there, or splits tied weights.
        OffloadError: ``offload_folder`` is needed and missing, or cannot be written.
        StateMismatchError: as ``strict`` says; names the first names of each kind, and how many more there are.
        ValueError: ``dtype`` is no floating dtype.
        UninitializedTensorError: a tensor would stay without values, unless ``strict=False``.
        CorruptCheckpointError: a file is truncated, or its header does not describe it.
        UnsafeCheckpointError: a file would run code, or a name in the index leaves the folder.
        FileChangedError: a file was changed while it was read.
    """
    if offload_8bit_bnb:
        raise NotAvailableError(
            "offload_8bit_bnb=True: plain loading does not quantise; load_and_quantize_model loads, quantises and "
            "offloads in one call"
        )
    request = Request(checkpoint, strict, full_state_dict, broadcast_from_rank0, revision, token)
    return _load(
        model,
        request,
        device_map,
        offload_folder,
        offload_buffers,
        dtype,
        keep_in_fp32_modules or (),
        progress,
    )


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool | None = None,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool = True,
    reserve: int | str | Sizes | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
) -> Model:
    """Load a checkpoint where a device map says, and let the model run from there.

    Args:
        model: usually built under ``init_empty_weights``; changed in place.
        checkpoint: as in :func:`load_checkpoint_in_model`.
        device_map: a map, or how to make one with :func:`infer_auto_device_map`: ``"auto"`` and ``"balanced"`` fill
            accelerators evenly, ``"balanced_low_0"`` leaves room on the first, ``"sequential"`` fills one after the
            other. ``None`` only loads.
        max_memory: of each device for a map that is made; see :func:`get_max_memory`.
        no_split_module_classes: classes of modules that a map that is made keeps on one device.
        offload_folder: as in :func:`load_checkpoint_in_model`.
        offload_buffers: buffers wait with the parameters that are offloaded.
        dtype: floating tensors become this dtype.
        offload_state_dict: as in :func:`load_checkpoint_in_model`.
        skip_keys: as in :func:`dispatch_model`.
        preload_module_classes: as in :func:`dispatch_model`.
        force_hooks: as in :func:`dispatch_model`.
        strict: as in :func:`load_checkpoint_in_model`, as are all that follow.
        full_state_dict: as there.
        broadcast_from_rank0: as there.
        revision: as there.
        token: as there.
        progress: as there.
        reserve: for a map that is made: memory of each device to leave free; see :func:`get_max_memory`.
        device_memory: as in :func:`dispatch_model`.
        host_memory: as in :func:`dispatch_model`.

    Returns:
        The model.

    Raises:
        DeviceMapError: ``device_map`` is a word that is not listed above; no accelerator of ``max_memory`` has room for
            the part that would go to it; or as there.
        UninitializedTensorError: a tensor would stay without values, also if ``strict=False``; without a device map, as
            there.
    """
    must_run = device_map is not None
    request = Request(checkpoint, strict, full_state_dict, broadcast_from_rank0, revision, token, must_run)

    def make_map() -> Mapping[str, Device] | None:
        if device_map is None:
            return None
        memory_sizes(device_memory, host_memory)  # dispatch_model would find out after the load
        destinations = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype,
            offload_buffers=offload_buffers, reserve=reserve, strict=True,
        )  # fmt: skip
        check_all_have_values(destinations)
        return destinations

    destinations = do_together(make_map, request.ranks(), doing=f"placing {checkpoint}")
    _load(model, request, destinations, offload_folder, offload_buffers, dtype, (), progress)
    if destinations is None:
        return model
    return dispatch_model(
        model, destinations, offload_dir=offload_folder, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes, force_hooks=force_hooks, device_memory=device_memory,
        host_memory=host_memory,
    )  # fmt: skip


def _load(
    model: nn.Module,
    request: Request,
    device_map: Mapping[str, Device] | None,
    offload_folder: str | os.PathLike[str] | None,
    offload_buffers: bool,
    dtype: str | torch.dtype | None,
    keep_in_fp32: Collection[str],
    progress: bool,
) -> LoadReport:
    """What both functions do; they are the only ones to call it, which warnings rely on."""

    def make_placer() -> Placer:
        check_folder(offload_folder, "offload_folder")
        if device_map is None:
            return Placer(None, dtype, keep_in_fp32)
        cache = None if offload_folder is None else OffloadCache(offload_folder)
        return MapPlacer(_destinations(model, device_map), cache, offload_buffers, dtype, keep_in_fp32)

    placer = do_together(make_placer, request.ranks(), doing=f"placing {request.checkpoint}")
    return load_weights(model, request, placer, progress=Progress() if progress else iter, stacklevel=3)


def _destinations(model: nn.Module, device_map: Mapping[str, Device] | str) -> dict[str, _Destination]:
    """A checked map."""
    if not isinstance(device_map, Mapping):
        raise DeviceMapError(
            f"device_map is {device_map!r}; load_checkpoint_in_model takes a map, as infer_auto_device_map makes it, "
            "or {'': device} for everything on one. Words are for load_checkpoint_and_dispatch"
        )
    check_device_map(model, device_map, strict=True)
    return {name: _Destination.of(destination) for name, destination in device_map.items()}


class _Destination(NamedTuple):
    home: torch.device | None
    on_disk: bool

    @classmethod
    def of(cls, entry: Device) -> _Destination:
        """Of an entry of a map."""
        device = execution_device(entry)
        if device is None:
            return cls(CPU, entry == "disk")
        return cls(None if device.type == "meta" else device, False)

    @property
    def slowness(self) -> int:
        """Tied names in several destinations are one tensor, in the fastest of them, if one of them is read at all."""
        return 4 if self.home is None else 2 * self.on_disk + (self.home == CPU)


class MapPlacer(Placer):
    """Tensors go where a device map says.

    Args:
        destinations: by module or tensor; they cover the model.
        cache: for what is on ``"disk"`` and in no file as it is needed.
        offload_buffers: whether buffers go there, too.
        dtype: of floating tensors.
        keep_in_fp32: parts of names whose tensors become float32 instead of float16.
    """

    def __init__(
        self,
        destinations: Mapping[str, _Destination],
        cache: OffloadCache | None,
        offload_buffers: bool,
        dtype: str | torch.dtype | None = None,
        keep_in_fp32: Collection[str] = (),
    ) -> None:
        super().__init__(None, dtype, keep_in_fp32)
        self._destinations = dict(destinations)
        self._has_disk = any(destination.on_disk for destination in destinations.values())
        self._cache = cache
        self._offload_buffers = offload_buffers
        self._file: CacheFile | None = None
        self._stored: dict[str, Step] = {}

    def home(self, target: Target) -> torch.device | None:
        """The device that the map gives; the CPU for what is on disk."""
        return self._destination(target).home

    def prepare(self, source: WeightSource, steps: Sequence[Step]) -> Sequence[Step]:
        """Find what has to be written to the cache, which comes first: if the disk is full, nothing has changed."""
        if self._has_disk:
            self._stored = {step.source: step for step in steps if self._has_to_be_stored(source, step)}
        if not self._stored:
            return steps
        if self._cache is None:
            names = listed([step.target.names[0] for step in self._stored.values()])
            raise OffloadError(
                f"the device map puts {names} on disk, and the checkpoint does not hold them as safetensors of the "
                "dtype that they get; pass offload_folder, a folder to write them to once"
            )
        about = {name: (step.target.tensor.shape, self.dtype(step)) for name, step in self._stored.items()}
        self._file = self._cache.open(source.fingerprint, about)
        first = [] if self._file.is_there else [*self._stored.values()]
        return [*first, *(step for step in steps if step.source not in self._stored)]

    def _has_to_be_stored(self, source: WeightSource, step: Step) -> bool:
        tensor = step.target.tensor
        if not self._destination(step.target).on_disk or not tensor.numel():
            return False
        if not (self._offload_buffers or isinstance(tensor, nn.Parameter)):
            return False
        return not source.is_mapped(step.source) or self.dtype(step) != step.saved

    def fills_parts(self, step: Step) -> bool:
        """No: a mesh says where tensors are that are divided among ranks."""
        return False

    def put(self, step: Step, value: torch.Tensor) -> None:
        """To the cache or to the device; on the host a view of the file also in place of values that are there."""
        if step.source in self._stored:
            assert self._file is not None, "opened when it was found to be needed"
            self._file.put(step.source, value.to(self.dtype(step)))
            return
        if step.home == CPU:
            assign(step.target, self.own(converted(value, CPU, self.dtype(step))))
        else:
            super().put(step, value)

    def abandon(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.abandon()

    def finish(self, rest: Sequence[Target]) -> None:
        """Take what is stored from the cache, and move what no checkpoint holds."""
        if self._file is not None:
            if not self._file.is_there:
                self._file.publish()
            views = self._file.tensors()
            for name, step in self._stored.items():
                assign(step.target, views[name])
        super().finish(rest)

    def _destination(self, target: Target) -> _Destination:
        if len(target.names) == 1:
            return self._entry(target.names[0])
        return min(map(self._entry, target.names), key=lambda destination: destination.slowness)

    def _entry(self, name: str) -> _Destination:
        """That of the name or of the nearest module above it, noted for the next tensor of the module.

        Only buffers that no checkpoint holds can be without: they stay on the host.
        """
        destination = self._destinations.get(name)
        if destination is not None:
            return destination
        parent = name.rpartition(".")[0]
        if parent not in self._destinations:
            self._destinations[parent] = self._entry(parent) if parent else _Destination(CPU, False)
        return self._destinations[parent]


class Progress:
    """A bar on stderr for loads that take longer than a second, on the first process of each node."""

    def __call__(self, steps: Sequence[Step]) -> Iterator[Step]:
        """Iterate over the steps; a step is done when the next is asked for."""
        began, bar, done = time.monotonic(), None, 0
        try:
            for step in steps:
                yield step
                done += step.nbytes
                if bar is not None:
                    bar.update(step.nbytes)
                elif time.monotonic() - began > _PATIENCE:
                    bar = _bar(done, sum(step.nbytes for step in steps))
        finally:
            if bar is not None:
                bar.close()


def _bar(done: int, total: int) -> Any:
    from accel_state.progress import tqdm

    # Asked of the launcher's variables: a load must not begin a world by itself.
    shown = detect(environment.snapshot()).local_rank == 0
    return tqdm(
        total=total, initial=done, desc="Loading weights", unit="B", unit_scale=True, main_process_only=False,
        disable=not shown,
    )  # fmt: skip
