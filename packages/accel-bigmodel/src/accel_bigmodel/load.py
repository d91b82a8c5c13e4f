"""Loading a checkpoint to several devices, host memory and disk."""

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
from accel_ckpt.coordination.ranks import do_together
from accel_ckpt.loading.load_model import (
    LoadReport,
    Placer,
    Request,
    Step,
    converted,
    load_weights,
)
from accel_ckpt.loading.load_targets import LoadTarget, assign
from accel_ckpt.loading.weights import WeightSource
from accel_ckpt.modules.names import listed
from accel_state import environment
from accel_state.clusters.topology import detect
from accel_state.errors import NotAvailableError

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

Device = int | str | torch.device
Model = TypeVar("Model", bound=nn.Module)

CPU = torch.device("cpu")

# Seconds before a load shows a progress bar; most loads are done by then, because no weights are copied.
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
    """Load weights into a model, each tensor to its device in a device map.

    The map and the names, shapes and dtypes are checked before a tensor is read or the model is changed. Tensors on the
    host become views of mapped safetensors files (copy on write): nothing is copied, and pages are read when touched.
    Tensors of ``.bin`` files are read. Tensors on ``"disk"`` stay there: in their safetensors file, or, if there is
    none or its dtype differs, in a file that is written to ``offload_folder`` once and reused by the next load.

    Args:
        model: changed in place; parameters that have values stay the same objects.
        checkpoint: a file, an index, a folder with ``model.safetensors``, ``pytorch_model.bin`` or an index, or the
            folder of a distributed checkpoint. A string ``org/name`` that is not a local path is a repository of a hub,
            whose weights are downloaded to huggingface_hub's cache.
        device_map: name of a module or tensor → index of an accelerator, a device, ``"cpu"`` or ``"disk"``; ``""`` is
            the whole model. Tensors on ``"meta"`` are not read by this process. ``None``: every tensor stays on its
            device; tensors on the meta device go to the CPU.
        offload_folder: folder for tensors on ``"disk"`` that are not in a safetensors file in the required dtype.
        dtype: floating-point tensors are converted to this dtype; by default to that of the model's tensor.
        offload_state_dict: has no effect: tensors are loaded one by one, so there is never a state dict in memory to
            offload.
        offload_buffers: buffers on ``"disk"`` that are not in a safetensors file are written to ``offload_folder`` like
            parameters, instead of staying in memory.
        keep_in_fp32_modules: with ``dtype`` float16, tensors with one of these in their name, between dots, are
            converted to float32.
        offload_8bit_bnb: not available; use ``load_and_quantize_model``.
        strict: ``None``: a missing name or another shape is an error, an unexpected name a warning. ``True``: all are
            errors. ``False``: all are warnings, and what matches is loaded. A name that is tied to one that is present
            is never missing.
        full_state_dict: ``False`` (per-rank shards) is not available for plain modules.
        broadcast_from_rank0: rank 0 reads, and sends the tensors that any rank needs; the others need no access to the
            files. Maps may differ between ranks. Collective.
        revision: revision of the repository: branch, tag or commit.
        token: for a private repository; by default the token of the last login.
        progress: show a progress bar when a load takes longer than a second, on the first process of each node.

    Returns:
        Names that were missing, unexpected or of another shape.

    Raises:
        DeviceMapError: the map does not cover the model, names something that does not exist, or splits tied weights.
        OffloadError: ``offload_folder`` is needed and missing, is not a path, or cannot be written.
        StateMismatchError: names or shapes differ, depending on ``strict``; lists the first names of each kind, and
            counts the rest.
        ValueError: ``dtype`` is not a floating-point dtype.
        UninitializedTensorError: a tensor would have no values after the load, unless ``strict=False``.
        CorruptCheckpointError: a file is truncated, or its header does not describe it.
        UnsafeCheckpointError: a file would run code, or a name in the index points outside the folder.
        FileChangedError: a file was changed while it was read.
    """
    if offload_8bit_bnb:
        raise NotAvailableError(
            "offload_8bit_bnb=True: load_checkpoint_in_model does not quantise; load_and_quantize_model loads, "
            "quantises and offloads in one call"
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
    """Load a checkpoint to the devices of a device map, and dispatch the model, so that it can run.

    Args:
        model: usually built under ``init_empty_weights``; changed in place.
        checkpoint: as in :func:`load_checkpoint_in_model`.
        device_map: a map, or how to infer one with :func:`infer_auto_device_map`: ``"auto"`` and ``"balanced"`` fill
            accelerators evenly, ``"balanced_low_0"`` leaves room on the first, ``"sequential"`` fills one after
            another. ``None`` only loads.
        max_memory: memory of each device, for an inferred map; see :func:`get_max_memory`.
        no_split_module_classes: classes of modules that an inferred map keeps on one device.
        offload_folder: as in :func:`load_checkpoint_in_model`.
        offload_buffers: offload buffers with their parameters.
        dtype: floating-point tensors are converted to this dtype.
        offload_state_dict: as in :func:`load_checkpoint_in_model`.
        skip_keys: as in :func:`dispatch_model`.
        preload_module_classes: as in :func:`dispatch_model`.
        force_hooks: as in :func:`dispatch_model`.
        strict: as in :func:`load_checkpoint_in_model`.
        full_state_dict: as in :func:`load_checkpoint_in_model`.
        broadcast_from_rank0: as in :func:`load_checkpoint_in_model`.
        revision: as in :func:`load_checkpoint_in_model`.
        token: as in :func:`load_checkpoint_in_model`.
        progress: as in :func:`load_checkpoint_in_model`.
        reserve: memory of each device to leave free, for an inferred map; see :func:`get_max_memory`.
        device_memory: as in :func:`dispatch_model`.
        host_memory: as in :func:`dispatch_model`.

    Returns:
        The model.

    Raises:
        DeviceMapError: ``device_map`` is a word that is not listed above; no accelerator of ``max_memory`` has room for
            a part of the model; or as in :func:`load_checkpoint_in_model`.
        UninitializedTensorError: a tensor would have no values after the load, even if ``strict=False``; without a
            device map, as in :func:`load_checkpoint_in_model`.
    """
    must_run = device_map is not None
    request = Request(checkpoint, strict, full_state_dict, broadcast_from_rank0, revision, token, must_run)

    def make_map() -> Mapping[str, Device] | None:
        if device_map is None:
            return None
        memory_sizes(device_memory, host_memory)  # else dispatch_model would fail only after the load
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
    """The implementation of both functions. Only they call it: the stack level of warnings depends on that."""

    def make_placer() -> Placer:
        check_folder(offload_folder, "offload_folder")
        if device_map is None:
            return Placer(None, dtype, keep_in_fp32)
        cache = None if offload_folder is None else OffloadCache(offload_folder)
        return MapPlacer(_destinations(model, device_map), cache, offload_buffers, dtype, keep_in_fp32)

    placer = do_together(make_placer, request.ranks(), doing=f"placing {request.checkpoint}")
    return load_weights(model, request, placer, progress=LoadProgress() if progress else iter)


def _destinations(model: nn.Module, device_map: Mapping[str, Device] | str) -> dict[str, _Destination]:
    """The destinations of a checked map."""
    if not isinstance(device_map, Mapping):
        raise DeviceMapError(
            f"device_map is {device_map!r}; load_checkpoint_in_model takes a map, such as infer_auto_device_map "
            "returns, or {'': device} for everything on one device. Only load_checkpoint_and_dispatch takes words"
        )
    check_device_map(model, device_map, strict=True)
    return {name: _Destination.of(destination) for name, destination in device_map.items()}


class _Destination(NamedTuple):
    home: torch.device | None
    on_disk: bool

    @classmethod
    def of(cls, entry: Device) -> _Destination:
        """The destination of an entry of a map."""
        device = execution_device(entry)
        if device is None:
            return cls(CPU, entry == "disk")
        return cls(None if device.type == "meta" else device, False)

    @property
    def slowness(self) -> int:
        """Sort key: a tensor with several names goes to the fastest of their destinations, if any of them is read."""
        return 4 if self.home is None else 2 * self.on_disk + (self.home == CPU)


class MapPlacer(Placer):
    """Places tensors according to a device map.

    Args:
        destinations: devices by name of module or tensor, for the whole model.
        cache: folder for tensors on ``"disk"`` that no file holds in the required dtype.
        offload_buffers: whether buffers go there too.
        dtype: dtype of floating-point tensors.
        keep_in_fp32: tensors with one of these in their name become float32 instead of float16.
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

    def home(self, target: LoadTarget) -> torch.device | None:
        """The device in the map; the CPU for tensors on disk."""
        return self._destination(target).home

    def prepare(self, source: WeightSource, steps: Sequence[Step]) -> Sequence[Step]:
        """Find the tensors to write to the cache. They come first, so that nothing has changed if the disk is full."""
        if self._has_disk:
            self._stored = {step.source: step for step in steps if self._has_to_be_stored(source, step)}
        if not self._stored:
            return steps
        if self._cache is None:
            names = listed([step.target.names[0] for step in self._stored.values()])
            raise OffloadError(
                f"the device map puts {names} on disk, but the checkpoint does not hold them as safetensors in the "
                "required dtype; pass offload_folder, a folder to write them to once"
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
        """False: a device mesh, not a device map, divides tensors among ranks."""
        return False

    def put(self, step: Step, value: torch.Tensor) -> None:
        """Put a tensor into the cache or on its device. On the host, a view of the file replaces existing values."""
        if step.source in self._stored:
            assert self._file is not None, "opened when it was found to be needed"
            self._file.put(step.source, value.detach().to(self.dtype(step)))
            return
        if step.home == CPU and value is not step.target.tensor:
            assign(step.target, self.own(converted(value, CPU, self.dtype(step))))
        else:
            super().put(step, value)

    def abandon(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.abandon()

    def finish(self, rest: Sequence[LoadTarget]) -> None:
        """Map the tensors that were written to the cache, and move those that are not in the checkpoint."""
        if self._file is not None:
            if not self._file.is_there:
                self._file.publish()
            views = self._file.tensors()
            for name, step in self._stored.items():
                assign(step.target, views[name])
        super().finish(rest)

    def _destination(self, target: LoadTarget) -> _Destination:
        if len(target.names) == 1:
            return self._entry(target.names[0])
        return min(map(self._entry, target.names), key=lambda destination: destination.slowness)

    def _entry(self, name: str) -> _Destination:
        """The destination of the name or of the nearest module above it, cached for the module's next tensor.

        Only non-persistent buffers can have none: they stay on the host.
        """
        destination = self._destinations.get(name)
        if destination is not None:
            return destination
        parent = name.rpartition(".")[0]
        if parent not in self._destinations:
            self._destinations[parent] = self._entry(parent) if parent else _Destination(CPU, False)
        return self._destinations[parent]


class LoadProgress:
    """A progress bar on stderr for loads that take longer than a second, on the first process of each node."""

    def __call__(self, steps: Sequence[Step]) -> Iterator[Step]:
        """Iterate over the steps; a step is done when the next one is requested."""
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

    # From the launcher's variables, because a load must not initialise the process group.
    shown = detect(environment.snapshot()).local_rank == 0
    return tqdm(
        total=total, initial=done, desc="Loading weights", unit="B", unit_scale=True, main_process_only=False,
        disable=not shown,
    )  # fmt: skip
