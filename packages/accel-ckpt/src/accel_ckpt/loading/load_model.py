"""Loading weights into a model on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_ckpt.coordination.ranks import Coordinator, SingleProcess, default_coordinator, do_together
from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError, UninitializedTensorError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.format.index import WeightFiles
from accel_ckpt.format.memory import collector_paused, copy_from_file, mapped_file_of, own_memory
from accel_ckpt.format.reader import MappedShard, read_pickled
from accel_ckpt.loading.load_targets import LoadTarget, ModelTensors, assign, tensors_of
from accel_ckpt.loading.mapped_files import watch_mapped_files
from accel_ckpt.loading.renaming import renamed_weights
from accel_ckpt.loading.translation import Translation, translating_modules
from accel_ckpt.loading.weights import BroadcastWeights, MappedWeights, WeightSource, open_weights
from accel_ckpt.locations import location
from accel_ckpt.modules.devices import existing_device
from accel_ckpt.modules.names import canonical_state_dict, listed
from accel_ckpt.modules.tensors import refuse_without_values, set_data
from accel_ckpt.parts import fill_part, is_sharded
from accel_ckpt.tensor_storage import parse_dtype
from accel_state.errors import DeviceError, NotAvailableError
from accel_state.installing import INSTALL
from accel_state.messages import warn

__all__ = [
    "LoadReport",
    "Placer",
    "Request",
    "Step",
    "check_checkpoint_fits",
    "converted",
    "load_checkpoint_in_model",
    "load_state_dict",
    "load_weights",
]

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]

CPU = torch.device("cpu")

# Bytes. A smaller load is so short that the garbage collector stays off until its end.
_SMALL_LOAD = 1 << 30

_PROBLEMS = {
    "missing": "is not in the checkpoint",
    "mismatched": "has another shape, kind of dtype or value",
    "unexpected": "is not in the model",
}
_FATAL: Mapping[bool | None, frozenset[str]] = {
    True: frozenset(_PROBLEMS),
    None: frozenset({"missing", "mismatched"}),
    False: frozenset(),
}
"""The kinds of problems that are errors, by ``strict``."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a load: names that were missing, unexpected or mismatched."""

    missing: tuple[str, ...] = ()
    """Names of the model that the checkpoint does not have, unless they are tied to a name that it has."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the model does not have."""
    mismatched: tuple[str, ...] = ()
    """Names with another shape, each as ``name: (shape in the checkpoint) instead of (shape in the model)``; with a
    dtype that cannot be converted without loss of meaning (complex to real, floating to integer, a quantised weight to
    a plain one); or with other values than a name that the model ties with it.
    """


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, torch.Tensor]:
    """Load one file of weights, safetensors or ``.bin``.

    Args:
        checkpoint_file: the file, or its URI. No code from it is run.
        device_map: for safetensors: module name → device; ``""`` is the whole model. Names that it does not
            cover, and ``"disk"``, stay on the CPU.

    Returns:
        Names to tensors, tied names included, in memory of their own.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is truncated, or was written for another framework.
        DeviceError: a device of ``device_map`` does not exist.
    """
    places = _devices_of(device_map or {})
    place = location(checkpoint_file)
    with find_folder(place.parent).file(place.name) as path:
        return _read_file(path, places)


def _read_file(path: Path, places: Mapping[str, torch.device | None]) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        content = read_pickled(path, mapped=False)
        return dict(content) if isinstance(content, Mapping) else content
    kind = MappedShard(path).header.metadata.get("format")
    if kind is None:
        warn(f"{path} does not say which framework wrote it; it is read as written by PyTorch")
    elif kind != "pt":
        raise CorruptCheckpointError(f"{path} was written for the framework {kind!r}; only 'pt' is read here")
    source = MappedWeights(WeightFiles((path,)))
    loaded: dict[tuple[str, torch.device | None], torch.Tensor] = {}
    result = {}
    for name in source.about:
        key = source.key_of(name)
        device = _device_of(name, places)
        if (key, device) not in loaded:
            tensor = own_memory(source.tensor(key))
            loaded[key, device] = tensor if device is None else tensor.to(device)
        result[name] = loaded[key, device]
    return result


def _devices_of(device_map: DeviceMap) -> dict[str, torch.device | None]:
    """The devices of a map; ``None`` for ``"disk"``.

    Raises:
        DeviceError: it is no map, or a device is not there.
    """
    _check_is_map(device_map)
    return {name: None if place == "disk" else _existing(place, name) for name, place in device_map.items()}


def _check_is_map(device_map: object) -> None:
    if not isinstance(device_map, Mapping):
        raise DeviceError(
            f"device_map is {device_map!r}; give a map from names of modules to devices, as {{'': {device_map!r}}} "
            "for everything on one"
        )


def _existing(place: Device, name: str) -> torch.device:
    return existing_device(place, f"the device_map puts {name!r} on")


def _device_of(name: str, devices: Mapping[str, torch.device | None]) -> torch.device | None:
    best = max(
        (key for key in devices if key == "" or name == key or name.startswith(key + ".")),
        key=len,
        default=None,
    )
    return None if best is None else devices[best]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: str | Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool | None = None,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> LoadReport:
    """Load weights into a model that is on one device, on the meta device, or divided among ranks.

    Everything is compared before anything is changed. A parameter that has values stays the same object, so optimizers
    that hold it stay valid. A parameter on the meta device gets values: on the CPU a view of the safetensors file (copy
    on write), or a copy of the values in a ``.bin`` file. Names are compared in canonical form. Each rank takes its
    part of a ``DTensor``, as ``fully_shard`` makes them. Extra state that is a tensor goes to the module's
    ``set_extra_state``.

    Args:
        model: changed in place.
        checkpoint: a file, an index, a URI of one, or a folder with ``model.safetensors``, ``pytorch_model.bin`` or an
            index, or of a distributed checkpoint. A string ``org/name`` that is not a local path is a repository of a
            hub, whose weights are downloaded to huggingface_hub's cache.
        device_map: ``None``: every tensor stays on its device, and tensors on the meta device go to the CPU. ``{"":
            device}``: all go there, including buffers that no checkpoint holds.
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
        broadcast_from_rank0: rank 0 reads and sends every tensor to the others, which need no access to the files.
            Collective.
        revision: revision of the repository: branch, tag or commit.
        token: for a private repository; by default the token of the last login.

    Returns:
        The names that were missing, unexpected or of another shape.

    Raises:
        StateMismatchError: names or shapes differ, as ``strict`` decides; lists the first names of each kind, and how
            many more there are.
        UninitializedTensorError: a tensor would stay without values, unless ``strict=False``.
        ValueError: ``dtype`` is not a floating-point dtype.
        DeviceError: the device of ``device_map`` does not exist.
        CorruptCheckpointError: a file is truncated, or its header does not describe it.
        UnsafeCheckpointError: a file would run code, or a name in the index leaves the folder.
        FileChangedError: a file was changed while it was read.
        NotAvailableError: an option needs several devices; names the package that has it.
    """
    request = Request(checkpoint, strict, full_state_dict, broadcast_from_rank0, revision, token)
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
    placer = Placer(device, dtype, keep_in_fp32_modules or ())
    return load_weights(model, request, placer)


def check_checkpoint_fits(model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
    """Check that a checkpoint exists and has the names and shapes of a model, before `load_checkpoint_in_model`.

    Reads headers only and changes nothing, so that a model can be checked before it is divided among ranks, and all
    ranks can agree. Values, such as those of tied names, are compared when they are loaded.

    Args:
        model: any model, also on the meta device.
        checkpoint: as `load_checkpoint_in_model` takes it.

    Raises:
        StateMismatchError: a name of the model is missing, or has another shape or kind of dtype.
        CheckpointNotFoundError: there is no such file or folder.
        CorruptCheckpointError: a file is truncated, or its header does not describe it.
        UnsafeCheckpointError: a name in the index leaves the folder.
    """
    tensors = tensors_of(model)
    placer = Placer(None, None, ())
    source, _ = _as_compared(model, open_weights(checkpoint), tensors, placer)
    plan = _compare(source, tensors, placer)
    tops = translating_modules(tensors, _names_as_in(source.about, tensors.targets))
    translated = tuple(canonical for _, canonical, _ in tops)

    def known(names: Sequence[str]) -> tuple[str, ...]:
        """Leave out names of modules that translate their state dict: only a load tells what they lack."""
        return tuple(name for name in names if not name.startswith(translated))

    report = plan.report
    report = LoadReport(known(report.missing), known(report.unexpected), known(report.mismatched))
    _judge(report, model, checkpoint, strict=None)


def _single_device(device_map: DeviceMap | None) -> torch.device | None:
    if device_map is None:
        return None
    _check_is_map(device_map)
    if set(device_map) != {""} or device_map[""] == "disk":
        raise NotAvailableError(
            f"the device map {dict(device_map)!r} places parts of the model, or puts it on disk, for which "
            f'accel-bigmodel has load_checkpoint_in_model ({INSTALL}). Pass None or {{"": device}}'
        )
    return _existing(device_map[""], "")


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments that all functions for loading weights have in common: which weights, and how.

    Raises:
        NotAvailableError: ``full_state_dict`` is False.
        ValueError: ``strict`` is not True, False or None.
    """

    checkpoint: str | os.PathLike[str]
    strict: bool | None = None
    full_state_dict: bool = True
    broadcast_from_rank0: bool = False
    revision: str | None = None
    token: str | bool | None = None
    must_run: bool = False
    """The model runs next, so even ``strict=False`` must not leave tensors without values."""

    def __post_init__(self) -> None:
        """Refuse values that are not supported."""
        if self.strict not in _FATAL:
            raise ValueError(
                f"strict is {self.strict!r}; pass True (every mismatch is an error), False (none is), or None (all "
                "except unexpected names are)"
            )
        if not self.full_state_dict:
            raise NotAvailableError(
                "full_state_dict=False loads the shards of each rank, which plain modules do not have; leave it at True"
            )

    def ranks(self) -> Coordinator:
        """The ranks that load together."""
        return default_coordinator() if self.broadcast_from_rank0 else SingleProcess()


class Step(NamedTuple):
    """One tensor of the model, and the tensor of the checkpoint with its values."""

    source: str
    """Name in the checkpoint."""
    saved: torch.dtype
    nbytes: int
    """Bytes of the tensor in the checkpoint."""
    target: LoadTarget
    home: torch.device


class Placer:
    """Decides the device and dtype of each tensor: here all go to one device, or each stays where it is.

    Args:
        device: the device for all; ``None``: tensors with values stay, the others go to the CPU.
        dtype: dtype of floating-point tensors; ``None``: that of the model's tensor.
        keep_in_fp32: with ``dtype`` float16, tensors with one of these in their name become float32.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        keep_in_fp32: Collection[str] = (),
    ) -> None:
        self.device = device
        self._dtype = None if dtype is None else parse_dtype(dtype)
        if self._dtype is not None and not self._dtype.is_floating_point:
            raise ValueError(
                f"dtype={dtype!r} is for floating tensors, whose values another kind of dtype would lose; give one "
                "such as torch.bfloat16. Weights are quantised by load_and_quantize_model of accel-bigmodel"
            )
        self._keep_in_fp32 = frozenset([keep_in_fp32] if isinstance(keep_in_fp32, str) else keep_in_fp32)
        self._taken: set[int] = set()  # memory that a tensor of the model already uses as its own

    def view(self, source: WeightSource) -> WeightSource:
        """The weights in the form that is compared with the model; here as they are saved."""
        return source

    def home(self, target: LoadTarget) -> torch.device | None:
        """The device for a tensor; ``None``: the tensor is not loaded here."""
        if self.device is not None:
            return self.device
        old = target.tensor.device
        return CPU if old.type == "meta" else old

    def dtype(self, step: Step) -> torch.dtype:
        """The dtype for a tensor."""
        old = step.target.tensor.dtype
        if not old.is_floating_point:  # a mask or a counter, whatever the file has it as
            return old
        if self._dtype == torch.float16 and self._keep_in_fp32:
            name = step.target.names[0]
            return torch.float32 if self._keep_in_fp32.intersection(name.split(".")) else torch.float16
        return self._dtype or old

    def prepare(self, source: WeightSource, steps: Sequence[Step]) -> Sequence[Step]:
        """Refuse impossible requests, before anything is read or changed; returns the steps, in order."""
        return steps

    def fills_parts(self, step: Step) -> bool:
        """Whether divided tensors (``DTensor``) can be loaded; they stay on their mesh's devices, in their dtype."""
        old = step.target.tensor
        return step.home == old.device and self.dtype(step) == old.dtype

    def put(self, step: Step, value: torch.Tensor) -> None:
        """Give a tensor of the model its values: in place if it has memory, else as a view of the mapped file."""
        old, home, dtype = step.target.tensor, step.home, self.dtype(step)
        if is_sharded(old):
            fill_part(old, value)
        elif old.device == home and old.dtype == dtype:
            if value is not old:  # as of a module that has filled it itself
                copy_from_file(old.detach(), value)
        else:
            assign(step.target, self.own(converted(value, home, dtype)))

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value, or a copy if another tensor of the model uses its memory already."""
        address = value.data_ptr()
        if address in self._taken and value.numel():
            return own_memory(value) if mapped_file_of(value) is not None else value.clone()
        self._taken.add(address)
        return value

    def abandon(self) -> None:
        """Called instead of ``finish`` after an error."""

    def finish(self, rest: Sequence[LoadTarget]) -> None:
        """Called when all values are in the model.

        Args:
            rest: the other tensors of the model, those that no checkpoint holds included.
        """
        for target in rest:
            home, tensor = self.home(target), target.tensor
            if home is not None and not tensor.is_meta and tensor.device != home:
                set_data(tensor, tensor.data.to(home))


def converted(value: torch.Tensor, home: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Convert a value to a device and dtype; returns it unchanged if it has both (a faster check than ``to``)."""
    if value.dtype == dtype and value.device == home:
        return value
    return own_memory(value.detach()).to(home, dtype)


def load_weights(
    model: nn.Module,
    request: Request,
    placer: Placer,
    *,
    progress: Callable[[Sequence[Step]], Iterable[Step]] = iter,
) -> LoadReport:
    """Load weights into a model, wherever a placer puts them.

    Everything is compared, and refused on all ranks together, before a tensor is read or the model changed.

    Args:
        model: changed in place.
        request: which weights, and how they are compared.
        placer: decides where tensors go.
        progress: wraps the iteration over the steps, to show progress.
    """
    coordinator, checkpoint = request.ranks(), request.checkpoint
    source: WeightSource
    if coordinator.world_size > 1:
        source = BroadcastWeights(checkpoint, coordinator, request.revision, request.token)
    else:
        source = open_weights(checkpoint, revision=request.revision, token=request.token)
    with collector_paused() as resume_collector:
        return _fill_model(model, source, request, placer, progress, resume_collector)


def _as_compared(
    model: nn.Module, source: WeightSource, tensors: ModelTensors, placer: Placer
) -> tuple[WeightSource, dict[str, str]]:
    """The weights as they are compared with a model, whose checkpoints may have other names; their canonical names."""
    names = _names_as_in((*source.about, *source.objects), tensors.targets)
    renamed = renamed_weights(model, source, names, tensors.targets.keys() | tensors.extra.keys())
    compared = placer.view(renamed)
    if compared is not source:
        names = _names_as_in((*compared.about, *compared.objects), tensors.targets)
    return compared, names


def _fill_model(
    model: nn.Module,
    saved: WeightSource,
    request: Request,
    placer: Placer,
    progress: Callable[[Sequence[Step]], Iterable[Step]],
    resume_collector: Callable[[], None],
) -> LoadReport:
    coordinator = request.ranks()
    doing = f"loading {request.checkpoint}"
    tensors = do_together(lambda: tensors_of(model), coordinator, doing=doing)
    source, names = do_together(lambda: _as_compared(model, saved, tensors, placer), coordinator, doing=doing)
    tops = translating_modules(tensors, names)
    translation = Translation(source, names, tensors, tops, request.strict) if tops else None
    load = _Load(model, translation or source, request, placer, tensors, translation)
    try:
        if translation is not None:
            do_together(translation.run, coordinator, doing=doing)
        report = load.run(progress, resume_collector)
    except BaseException:
        if translation is not None:
            translation.undo()
        raise
    watch_mapped_files(model)
    return report


class _Load:
    """One load: compares, then reads.

    Args:
        model: changed in place.
        source: the weights.
        request: which weights, and how.
        placer: where tensors go.
        tensors: of the model.
        translation: the source, if modules translate it.
    """

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        request: Request,
        placer: Placer,
        tensors: ModelTensors,
        translation: Translation | None,
    ) -> None:
        self._model, self._source, self._request, self._placer = model, source, request, placer
        self._tensors, self._translation = tensors, translation

    def run(
        self, progress: Callable[[Sequence[Step]], Iterable[Step]], resume_collector: Callable[[], None]
    ) -> LoadReport:
        """Compare everything, then fill the model."""
        source, placer, coordinator = self._source, self._placer, self._request.ranks()
        checkpoint, doing = self._request.checkpoint, f"loading {self._request.checkpoint}"
        plan = do_together(lambda: _compare(source, self._tensors, placer), coordinator, doing=doing)
        differing = source.differing([*plan.ties])
        read = {id(step.target) for step in plan.steps}
        rest = [target for target in (*plan.targets.values(), *plan.hidden) if id(target) not in read]

        def fill() -> LoadReport:
            try:
                for step in progress(steps_to_do):
                    placer.put(step, source.tensor(step.source))
                for name, module in plan.extra.items():
                    given = source.objects[name] if name in source.objects else source.tensor(name).clone()
                    module.set_extra_state(given)
            except Exception:
                source.finish()  # other ranks wait for this one's part
                raise
            source.finish()
            placer.finish(rest)
            return self._finished(report)

        try:
            report, steps_to_do = do_together(
                lambda: self._judged(plan, differing, rest), coordinator, doing=doing
            )
            if plan.missing_extra and not self._request.strict:
                warn(
                    f"{checkpoint} has no extra state for {listed(plan.missing_extra)}, which stays as it is"
                )
            if not self._is_judged_after:
                _warn(report, self._model, checkpoint)
            source.begin(
                [step.source for step in steps_to_do] + [n for n in plan.extra if n not in source.objects]
            )
            if sum(step.nbytes for step in steps_to_do) >= _SMALL_LOAD:
                resume_collector()
            report = do_together(fill, coordinator, doing=doing)
        except BaseException:
            placer.abandon()
            raise
        if self._is_judged_after:
            _warn(report, self._model, checkpoint)
        return report

    def _judged(
        self, plan: _LoadPlan, differing: set[tuple[str, str]], rest: Sequence[LoadTarget]
    ) -> tuple[LoadReport, Sequence[Step]]:
        strict, checkpoint, placer = self._request.strict, self._request.checkpoint, self._placer
        wrong = tuple(problem for pair, problem in plan.ties.items() if pair in differing)
        errors = () if self._translation is None else tuple(self._translation.errors)
        # Files of safetensors lack what is no tensor, and weights alone do: only torch's own strictness refuses them.
        extra = tuple(plan.missing_extra) if strict else ()
        report = replace(
            plan.report,
            missing=plan.report.missing + extra,
            mismatched=plan.report.mismatched + wrong + errors,
        )
        asked = report
        if self._is_judged_after:
            asked = replace(report, missing=(), unexpected=())
        _judge(asked, self._model, checkpoint, strict)
        empty = [t.names[0] for t in rest if t.tensor.is_meta and placer.home(t) is not None]
        if "missing" in _FATAL[strict]:
            refuse_without_values(empty, [target.names[0] for target in plan.hidden])
        elif self._request.must_run:
            _refuse_to_leave(empty, checkpoint)
        return report, placer.prepare(self._source, plan.steps)

    @property
    def _is_judged_after(self) -> bool:
        return self._translation is not None and self._translation.is_judged_after

    def _finished(self, report: LoadReport) -> LoadReport:
        """Let hooks of modules say what is missing, which they may do when all is loaded."""
        if self._translation is None or not self._is_judged_after:
            return report
        missing, unexpected = self._translation.after(report.missing, report.unexpected)
        report = replace(report, missing=tuple(missing), unexpected=tuple(unexpected))
        _judge(
            report, self._model, self._request.checkpoint, self._request.strict, "All that fits was loaded"
        )
        return report


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    report: LoadReport
    steps: list[Step]
    targets: dict[str, LoadTarget]
    hidden: list[LoadTarget]
    extra: dict[str, nn.Module]
    """Name in the checkpoint → the module that takes this as its extra state."""
    missing_extra: list[str]
    """Names of extra state that modules take and the checkpoint does not have."""
    ties: dict[tuple[str, str], str]
    """Two names of the checkpoint that the model ties → what is wrong if their values differ."""


def _compare(source: WeightSource, tensors: ModelTensors, placer: Placer) -> _LoadPlan:
    about, targets = source.about, tensors.targets
    mismatched, unexpected = [], []
    steps: list[Step] = []
    extra: dict[str, nn.Module] = {}
    ties: dict[tuple[str, str], str] = {}
    provided: dict[int, str] = {}
    unusable: set[int] = set()
    names = _names_as_in((*about, *source.objects), targets)
    in_parts = {
        above for name in names.values() if name not in targets for above in _above(name) if above in targets
    }
    scaled = {raw.rpartition("_scale")[0] for raw, name in names.items() if name not in targets}
    for raw, name in names.items():
        target = targets.get(name)
        if target is None:
            if name in tensors.extra:
                extra[raw] = tensors.extra[name]
            elif in_parts.isdisjoint(_above(name)):
                unexpected.append(raw)
            continue
        if raw in source.objects:
            mismatched.append(f"{name}: one {type(source.objects[raw]).__qualname__} instead of a tensor")
            unusable.add(id(target))
            continue
        info = about[raw]
        shape, dtype = info.shape, info.dtype
        key, tensor = id(target), target.tensor
        if name in in_parts:
            part = next(other for other in names.values() if other.startswith(f"{name}."))
            mismatched.append(
                f"{name}: quantised, in parts such as {part}, which its module does not "
                "take (load_and_quantize_model of accel-bigmodel does)"
            )
            unusable.add(key)
        elif shape != tensor.shape:
            mismatched.append(f"{name}: {tuple(shape)} instead of {tuple(tensor.shape)}")
            unusable.add(key)
        elif dtype != tensor.dtype and _loses_values(dtype, tensor.dtype):
            mismatched.append(f"{name}: {dtype} instead of {tensor.dtype}")
            unusable.add(key)
        elif dtype.itemsize == 1 and dtype != tensor.dtype and _is_quantized(dtype, tensor, raw in scaled):
            mismatched.append(f"{name}: {dtype}, quantised, instead of {tensor.dtype}")
            unusable.add(key)
        elif (first := provided.setdefault(key, raw)) != raw:
            ties[raw, first] = f"{name}: other values than {first}, with which the model ties it"
        elif (home := placer.home(target)) is not None:
            steps.append(Step(raw, dtype, tensor.numel() * dtype.itemsize, target, home))
    divided = [s.target.names[0] for s in steps if is_sharded(s.target.tensor) and not placer.fills_parts(s)]
    if divided:
        raise StateMismatchError(
            f"{listed(divided)} of the model are divided among ranks (DTensor), where they stay in their dtype: load "
            "them without device_map and dtype. Parts on the meta device need memory first: model.to_empty(device=…)"
        )
    missing = [name for name, t in targets.items() if id(t) not in provided and id(t) not in unusable]
    report = LoadReport(tuple(missing), tuple(unexpected), tuple(mismatched))
    missing_extra = sorted(tensors.extra.keys() - {names[raw] for raw in extra})
    return _LoadPlan(report, steps, targets, tensors.hidden, extra, missing_extra, ties)


def _above(name: str) -> Iterator[str]:
    """The names of the modules above a tensor; one of them may be a tensor that is saved in parts."""
    while name := name.rpartition(".")[0]:
        yield name


def _loses_values(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether conversion would drop imaginary parts, or the fraction; masks may become bool."""
    if saved.is_complex:
        return not wanted.is_complex
    return saved.is_floating_point and not (
        wanted.is_floating_point or wanted.is_complex or wanted == torch.bool
    )


def _is_quantized(saved: torch.dtype, wanted: torch.Tensor, has_scale: bool) -> bool:
    """Whether what is saved in 8 bits means nothing without scales that the model does not take; masks have none."""
    is_code = has_scale or saved in (torch.int8, torch.uint8)
    return is_code and wanted.dtype.is_floating_point and isinstance(wanted, nn.Parameter)


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


def _judge(
    report: LoadReport,
    model: nn.Module,
    checkpoint: object,
    strict: bool | None,
    done: str = "Nothing was changed",
) -> None:
    fatal = _FATAL[strict]
    errors = [
        f"{what}: {listed(getattr(report, kind))}"
        for kind, what in _PROBLEMS.items()
        if getattr(report, kind) and kind in fatal
    ]
    if errors:
        if report.unexpected and "unexpected" not in fatal:  # often the same tensors by other names
            errors.append(f"{_PROBLEMS['unexpected']}: {listed(report.unexpected)}")
        raise StateMismatchError(
            f"{checkpoint} does not fit the model; "
            + "; ".join(errors)
            + f". {done}; strict=False loads what matches and reports the rest"
            + (_advice_on_names(model) if report.missing and report.unexpected else "")
        )


def _refuse_to_leave(empty: Sequence[str], checkpoint: object) -> None:
    if empty:
        raise UninitializedTensorError(
            f"the model cannot run with what {checkpoint} holds: strict=False would leave tensors without values (meta "
            f"device): {listed(empty)}. Nothing was changed; give them values before, for example by building these "
            "modules outside of init_empty_weights"
        )


def _advice_on_names(model: nn.Module) -> str:
    """Some names only transformers' own loading translates: by a `key_mapping`, and by rules of a quantiser."""
    if not any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__):
        return ""
    return (
        f". If these are other names for the same weights, {type(model).__name__}.from_pretrained of transformers "
        "translates them: dispatch_model of accel-bigmodel takes the model that it gives, and what save_model writes "
        "of that model is loaded here as it is"
    )


def _warn(report: LoadReport, model: nn.Module, checkpoint: object) -> None:
    advice = _advice_on_names(model) if report.missing and report.unexpected else ""
    for kind in ("missing", "mismatched"):
        if names := getattr(report, kind):
            warn(f"{checkpoint} does not fill the whole model; {_PROBLEMS[kind]}: {listed(names)}")
    if report.unexpected:
        warn(
            f"Some weights of the model checkpoint {checkpoint} were not used, because the model has no "
            f"tensors of these names: {listed(report.unexpected)}{advice}"
        )
