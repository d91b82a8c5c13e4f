"""Loading a model with quantised weights: each weight is quantised when it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import Sizes
from accel_bigmodel.dispatch import dispatch_model, undispatch
from accel_bigmodel.errors import OffloadError
from accel_bigmodel.offload_cache import check_folder
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_bigmodel.quantization.device_map import (
    Device,
    PartDevices,
    check_sizes,
    get_quantized_model_device_map,
)
from accel_bigmodel.quantization.engine import Engine, quantization_engine
from accel_bigmodel.quantization.packed import PackedWeights
from accel_bigmodel.quantization.selection import (
    SelectedLayer,
    is_named,
    kept_in_float32,
    select_layers,
    warn_of_unknown,
)
from accel_ckpt.errors import UninitializedTensorError
from accel_ckpt.format.memory import mapped_file_of, trim_heap
from accel_ckpt.loading.load_model import Placer, Request, Step, load_weights
from accel_ckpt.loading.load_targets import LoadTarget
from accel_ckpt.loading.weights import WeightSource
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.tensors import (
    check_is_module,
    check_nothing_on_meta,
    get_non_persistent_buffers,
    set_data,
)

__all__ = ["load_and_quantize_model"]

Model = TypeVar("Model", bound=nn.Module)

# Bytes of unquantised weights after which freed memory is returned to the system.
_TRIM = 1 << 25


def load_and_quantize_model(
    model: Model,
    bnb_quantization_config: QuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Device] | Device | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Sizes | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
    *,
    strict: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Model:
    """Load a model with quantised linear layers, from a checkpoint or from the model's own weights.

    One weight at a time is read, quantised and put on its device, so that at most one layer of a model built under
    ``init_empty_weights`` is in memory in full precision. Quantised layers become layers of the engine, whose weights
    cannot be trained. Checkpoints saved from a quantised model are loaded as they are.

    Args:
        model: changed in place. Its weights may be on the meta device if a checkpoint is given.
        bnb_quantization_config: what to quantise, and how: a `BnbQuantizationConfig` or `TorchAoQuantizationConfig`.
        weights_location: a file, an index, a folder, or a repository ``org/name`` of a hub. ``None``: the model's own
            weights are quantised.
        device_map: devices of the parts of the model: a map, one device for all of it, or a word such as ``"auto"``. By
            default all of it goes to the accelerator, or to the CPU if there is none.
        no_split_module_classes: classes whose modules stay whole, for an inferred map.
        max_memory: bytes by device, for an inferred map.
        offload_folder: for unquantised modules on ``"disk"``, if the checkpoint does not hold them in the required
            dtype.
        offload_state_dict: has no effect, because weights are read one at a time; accepted for compatibility with
            Accelerate.
        strict: which missing, unexpected and mismatched names are errors: see ``load_checkpoint_in_model``.
        revision: revision of a repository: branch, tag or commit.
        token: for a private repository; by default the token of the last login.

    Returns:
        The model, with ``hf_device_map``, ``quantization_method`` and, for bitsandbytes, ``is_loaded_in_8bit`` and
        ``is_loaded_in_4bit``. ``is_quantized`` is not set, because transformers expects ``hf_quantizer`` beside it.

    Raises:
        TypeError: ``model`` is not a module.
        MissingDependencyError: the engine is not installed.
        QuantizationError: there is nothing to quantise; a layer cannot be quantised, or not on its device; the
            checkpoint was quantised with another configuration. Names the layers.
        DeviceMapError: the map omits a tensor, or names a device that does not exist.
        UninitializedTensorError: the model has tensors on the meta device without values.
        OffloadError: ``offload_folder`` is needed and missing, is not a path, or cannot be written.
        StateMismatchError: names or shapes differ, depending on ``strict``; lists the first names of each kind, and
            counts the rest.
    """
    check_is_module(model)
    check_folder(offload_folder, "offload_folder")
    engine = quantization_engine(bnb_quantization_config)
    config = bnb_quantization_config
    layers = select_layers(model, config)
    warn_of_unknown(model, config)
    places = PartDevices(
        get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    )
    check_sizes(layers, places, engine, config)
    placer = _QuantizingPlacer(model, config, engine, layers, places, has_folder=offload_folder is not None)
    del layers  # and with them the weights that are replaced
    if weights_location is None:
        _check_has_values(model)
        placer.prepare_own()
        placer.finish(())
    else:
        must_run = places.are_several  # as dispatch_model requires
        request = Request(weights_location, strict, revision=revision, token=token, must_run=must_run)
        load_weights(model, request, placer)
    for name, value in {**engine.flags, "hf_device_map": places.device_map}.items():
        setattr(model, name, value)
    return (
        dispatch_model(model, places.device_map, offload_dir=offload_folder) if places.are_several else model
    )


def _check_has_values(model: nn.Module) -> None:
    try:
        check_nothing_on_meta(model)
    except UninitializedTensorError as error:
        raise UninitializedTensorError(
            f"{error}; give weights_location, a checkpoint with these values"
        ) from error


class _QuantizingPlacer(Placer):
    """Quantises the weights of layers as they are loaded, and converts other tensors."""

    def __init__(
        self,
        model: nn.Module,
        config: QuantizationConfig,
        engine: Engine,
        layers: Sequence[SelectedLayer],
        places: PartDevices,
        has_folder: bool,
    ) -> None:
        super().__init__(dtype=config.dtype)
        self._has_folder = has_folder
        self._model, self._config, self._engine, self._devices_of = model, config, engine, places
        self._keep = kept_in_float32(model, config)
        self._waiting = {id(layer.module.weight): layer for layer in layers}
        self._linear = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear)
        }
        self._packed: PackedWeights | None = None
        self._quantized: set[int] = set()  # parameters of the model
        self._since_trim = 0

    def view(self, source: WeightSource) -> WeightSource:
        """The checkpoint, with weights that are quantised already shown as single tensors of the layer's shape."""
        self._packed = PackedWeights(source, self._linear, self._config.dtype)
        return self._packed

    def home(self, target: LoadTarget) -> torch.device:
        """The device in the device map."""
        return self._devices_of.of(target.names[0])

    def dtype(self, step: Step) -> torch.dtype:
        """The dtype in the configuration."""
        floating = step.target.tensor.dtype.is_floating_point
        if floating and is_named(step.target.names[0], self._keep):
            return torch.float32
        return super().dtype(step)

    def prepare(self, source: WeightSource, steps: Sequence[Step]) -> Sequence[Step]:
        """Compare weights that are quantised already with those the engine makes. Layers are replaced last.

        By then their biases, which the new layers take over, have values.
        """
        assert self._packed is not None
        layers = {name: layer.module for layer in self._waiting.values() for name in layer.names}
        self._packed.check(layers, self._engine, {name: self._devices_of.of(name) for name in layers})
        self._refuse_homeless(
            step.target.names[0]
            for step in steps
            if self._waits_on_disk(step.target.names[0], step.target.tensor)
            and not (source.is_mapped(step.source) and self.dtype(step) == step.saved)
        )
        self._linear.clear()  # frees modules that are replaced, with their weights
        undispatch(self._model)  # a streamer would continue to move the weights that are replaced
        return sorted(steps, key=lambda step: id(step.target.tensor) in self._waiting)

    def prepare_own(self) -> None:
        """Do the same as ``prepare`` for the model's own weights."""
        self._refuse_homeless(
            name
            for name, tensor in self._model.named_parameters()
            if self._waits_on_disk(name, tensor)
            and (mapped_file_of(tensor) is None or tensor.dtype != self._converted(name))
        )
        undispatch(self._model)

    def _waits_on_disk(self, name: str, tensor: torch.Tensor) -> bool:
        plain = isinstance(tensor, nn.Parameter) and id(tensor) not in self._waiting
        return plain and tensor.numel() > 0 and self._devices_of.is_on_disk(name)

    def _refuse_homeless(self, names: Iterable[str]) -> None:
        """Refuse weights to keep on disk that no file holds as needed, before `dispatch_model`, which runs last."""
        found = () if self._has_folder else sorted(names)
        if found:
            raise OffloadError(
                f"{listed(found)} are to be kept on disk, but no safetensors file holds them in the required dtype; "
                "pass offload_folder, a folder to write them to once"
            )

    def _converted(self, name: str) -> torch.dtype:
        return torch.float32 if is_named(name, self._keep) else self._config.dtype

    def fills_parts(self, step: Step) -> bool:
        """No: layers are quantised as a whole."""
        return False

    def put(self, step: Step, value: torch.Tensor) -> None:
        """Quantise or convert a tensor."""
        layer = self._waiting.pop(id(step.target.tensor), None)
        if layer is None:
            super().put(step, value)
            return
        home = self.home(step.target)
        name = step.source.removesuffix(".weight")
        if self._packed is not None and name in self._packed.pieces:
            new = self._engine.restore(layer.module, self._packed.read(name), home)
        else:
            new = self._engine.quantize(layer.module, value.detach().to(self.dtype(step)), home)
        self._replace(layer, new)

    def finish(self, rest: Sequence[LoadTarget]) -> None:
        """Quantise and convert tensors that are not in the checkpoint."""
        model = self._model
        self._packed = None
        while self._waiting:
            _, layer = self._waiting.popitem()
            weight = layer.module.weight.detach()
            if weight.device.type != "meta":
                home = self._devices_of.of(layer.names[0])
                new = self._engine.quantize(layer.module, weight.to(self._config.dtype), home)
                self._replace(layer, new)
        hidden = get_non_persistent_buffers(model, recurse=True, fqns=True)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type == "meta" or id(tensor) in self._quantized:
                continue
            converts = tensor.dtype.is_floating_point and name not in hidden
            dtype = self._converted(name) if converts else tensor.dtype
            set_data(tensor, tensor.data.to(self._devices_of.of(name), dtype))
        trim_heap()

    def _replace(self, layer: SelectedLayer, new: nn.Module) -> None:
        for name in layer.names:
            self._model.set_submodule(name, new)
        self._quantized.update(id(parameter) for name, parameter in new.named_parameters() if name != "bias")
        self._since_trim += layer.module.in_features * layer.module.out_features * 4
        if self._since_trim > _TRIM:
            self._since_trim = 0
            trim_heap()
