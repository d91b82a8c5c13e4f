"""Checkpoints with quantised weights, each shown as one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.engine import Engine, Pieces
from accel_ckpt.loading.weights import About, Pair, TensorInfo, WeightSource

__all__ = ["PackedWeights"]

# The most layers that a message lists.
_LISTED = 8

# Of bitsandbytes in 8 bits; the names of all others begin with the name of the weight.
_BESIDE = frozenset({"SCB", "weight_format"})


class PackedWeights:
    """A checkpoint in which each quantised weight appears as one tensor of the layer's shape.

    Args:
        opened: the checkpoint.
        linear: every linear layer of the model by name.
        dtype: dtype of quantised weights as they appear.
    """

    def __init__(self, opened: WeightSource, linear: Mapping[str, nn.Linear], dtype: torch.dtype) -> None:
        self.opened = opened
        self.pieces = _find_pieces(opened.about, linear)
        """Name of a layer → names of its pieces after ``<layer>.``."""
        hidden = {f"{layer}.{piece}" for layer, pieces in self.pieces.items() for piece in pieces}
        plain = {name: value for name, value in opened.about.items() if name not in hidden}
        packed: dict[str, TensorInfo] = {}
        for name in self.pieces:
            shape = linear[name].out_features, linear[name].in_features
            packed[f"{name}.weight"] = torch.empty(shape, dtype=dtype, device="meta")
        self.about: About = {**plain, **packed}
        self.fingerprint = opened.fingerprint
        self.objects, self.versions = opened.objects, opened.versions

    def check(
        self, layers: Mapping[str, nn.Linear], engine: Engine, places: Mapping[str, torch.device]
    ) -> None:
        """Compare names, shapes and dtypes of all pieces with those that the engine makes.

        Args:
            layers: the layers to quantise, by name.
            engine: the engine of the configuration.
            places: their devices, by name.

        Raises:
            QuantizationError: names the layers and what differs.
        """
        wrong: dict[str, list[str]] = {}  # by layer
        kinds: dict[str, None] = {}
        for name, pieces in self.pieces.items():
            if name not in layers:
                wrong[name] = [f"{name} is quantised in the checkpoint, but is not to be quantised here"]
                continue
            expected = engine.expected_pieces(layers[name], places[name])
            for piece in sorted(pieces | expected.keys()):
                found = self.opened.about.get(f"{name}.{piece}")
                if (problem := _difference(found, expected.get(piece))) is not None:
                    wrong.setdefault(name, []).append(f"{name}.{piece} {problem}")
            if name in wrong and (there := _kind(pieces)) != (here := _kind(expected)):
                kinds[f"it holds {there}, and asked for is {here}"] = None
        if wrong:
            problems = [problem for name in sorted(wrong)[:_LISTED] for problem in wrong[name]]
            problems += [f"and {len(wrong) - _LISTED} more layers"] if len(wrong) > _LISTED else []
            raise QuantizationError(
                f"the checkpoint holds weights that were quantised with another configuration: "
                f"{'; '.join([*kinds, *problems])}. "
                "Load it with the configuration that it was saved with, on the same type of device; nothing was "
                "changed"
            )

    def read(self, layer: str) -> Pieces:
        """The pieces of a quantised weight, on the CPU."""
        return {piece: self.opened.tensor(f"{layer}.{piece}") for piece in self.pieces[layer]}

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor is a view of a file."""
        return name in self.opened.about and self.opened.is_mapped(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU; empty for a quantised weight, which exists only as pieces."""
        return torch.empty(0, device="cpu") if self._is_packed(name) else self.opened.tensor(name)

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """The pairs of names whose values differ: for two quantised weights, any of the pieces.

        A quantised and a plain weight cannot be compared; `check` refuses the quantised one.
        """
        asked: dict[Pair, Pair] = {}
        for pair in pairs:
            layers = [name.removesuffix(".weight") for name in pair if self._is_packed(name)]
            if not layers:
                asked[pair] = pair
            elif len(layers) == 2:
                first, second = layers
                common = self.pieces[first] & self.pieces[second]
                asked |= {(f"{first}.{piece}", f"{second}.{piece}"): pair for piece in common}
        return {asked[found] for found in self.opened.differing([*asked])}

    def begin(self, names: Collection[str]) -> None:
        """Announce the tensors that will be read."""
        packed = {name.removesuffix(".weight") for name in names if self._is_packed(name)}
        pieces = [f"{layer}.{piece}" for layer in packed for piece in self.pieces[layer]]
        self.opened.begin([*(name for name in names if not self._is_packed(name)), *pieces])

    def finish(self) -> None:
        """Announce that no more will be read."""
        self.opened.finish()

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.pieces


def _find_pieces(names: Collection[str], layers: Collection[str]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}  # in the order of the names, which must be the same in all processes
    for name in names:
        layer, _, piece = name.rpartition(".")
        if piece not in _BESIDE:
            layer, below, piece = name.partition(".weight.")
            piece = f"weight.{piece}" if below else ""
        if piece and layer in layers:
            found.setdefault(layer, set()).add(piece)
    for layer, pieces in found.items():
        pieces.update({"weight"} if f"{layer}.weight" in names else ())
    return {layer: frozenset(pieces) for layer, pieces in found.items()}


def _kind(pieces: Collection[str]) -> str:
    """How a weight was quantised, in the words of the configuration, by the names of its pieces."""
    if "SCB" in pieces:
        return "8 bits of bitsandbytes (load_in_8bit=True)"
    for piece in pieces:
        _, found, kind = piece.partition(".quant_state.bitsandbytes__")
        if found:
            nested = "weight.nested_absmax" in pieces
            return (
                f"4 bits of bitsandbytes (load_in_4bit=True, bnb_4bit_quant_type={kind!r}, "
                f"bnb_4bit_use_double_quant={nested})"
            )
    return f"weights in the pieces {', '.join(sorted(pieces))}"


def _difference(
    found: TensorInfo | None, expected: tuple[torch.Size | None, torch.dtype] | None
) -> str | None:
    if found is None or expected is None:
        return "is missing" if found is None else "is not expected"
    shape, dtype = expected
    if found.dtype != dtype or (shape is not None and tuple(found.shape) != tuple(shape)):
        wanted = f"{dtype} {'' if shape is None else tuple(shape)}".rstrip()
        return f"is {found.dtype} {tuple(found.shape)} instead of {wanted}"
    return None
