"""The shape of a model for a plan: counts of parameters, and the course of memory in a training step.

Nothing here imports torch: sizes may come from the headers of files as well as from a model.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["ModelShape", "Phase", "Timeline", "UnitSizes", "shape_of_tensors"]

_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a training step: the forward or the backward of a unit, or of the layers around the units.

    Attributes:
        unit: index of the unit; None: the layers outside of all units.
        backward: whether it belongs to the backward.
        fixed: peak bytes that do not grow with the batch, without weights and complete gradients.
        per_sample: bytes that each sample adds.
        logits: of these, bytes of tensors as wide as the vocabulary.
        gradients: number of elements of the gradients that become complete in this phase.
    """

    unit: int | None
    backward: bool
    fixed: float
    per_sample: float
    logits: float
    gradients: int

    def at(self, batch_size: int) -> float:
        """Peak bytes with this number of samples."""
        return max(0.0, self.fixed + self.per_sample * batch_size)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The phases of a forward and backward, in order."""

    phases: tuple[Phase, ...]

    def with_more_units(self, count: int, left: tuple[float, float] = (0.0, 0.0)) -> Timeline:
        """Extend the timeline by `count` units after the third, each equal to the third.

        Each of them keeps as many bytes as the third adds to the second.

        Args:
            count: number of units to add.
            left: bytes that each unit leaves until the end of the backward, such as a cache of keys and values, and
                such bytes that each sample adds.
        """
        added = {backward: self._added(backward) for backward in (False, True)}
        found: list[Phase] = []
        for at, phase in enumerate(self.phases):
            adds = added[phase.backward]
            if phase.unit == 2:
                order = range(count, -1, -1) if phase.backward else range(count + 1)
                found += [_later(phase, more, adds, 2 + more) for more in order]
            else:
                unit = phase.unit + count if phase.unit is not None and phase.unit > 2 else phase.unit
                found.append(_later(phase, count if self._holds(at) else 0, adds, unit))
        # The difference between two units in the backward lacks what a unit leaves.
        return Timeline(
            tuple(_later(phase, count, left, phase.unit) if phase.backward else phase for phase in found)
        )

    def _added(self, backward: bool) -> tuple[float, float]:
        units = {phase.unit: phase for phase in self.phases if phase.backward == backward}
        return units[2].fixed - units[1].fixed, units[2].per_sample - units[1].per_sample

    def _holds(self, at: int) -> bool:
        """Whether what the third unit keeps is alive in a phase: after its forward, before its backward."""
        before = self.phases[:at]
        ran = any(phase.unit == 2 and not phase.backward for phase in before)
        return ran and not any(phase.unit == 2 and phase.backward for phase in before)


def _later(phase: Phase, count: int, added: tuple[float, float], unit: int | None) -> Phase:
    return replace(
        phase,
        unit=unit,
        fixed=phase.fixed + count * added[0],
        per_sample=phase.per_sample + count * added[1],
    )


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes of a unit, or of the layers outside of all units, in elements.

    Attributes:
        parameters: all parameters; a tied parameter counts at its first use.
        trainable: trained parameters.
        factored: elements of Adafactor's state: rows and columns of trained matrices, other tensors whole.
        divisible: parameters that the model's tensor-parallel plan divides.
        largest: elements of its largest trained tensor.
        experts: parameters of experts, which expert parallelism divides.
        trained_experts: those of them that are trained.
    """

    parameters: int
    trainable: int
    factored: int
    divisible: int = 0
    largest: int = 0
    experts: int = 0
    trained_experts: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, in elements unless another unit is named.

    Attributes:
        name: name of its class, or of its files.
        units: the repeated blocks, each of which a strategy may gather at a time.
        outside: the layers outside of them: embeddings, final norms, heads.
        buffers: bytes of its buffers.
        tensors: number of trained tensors.
        hidden_size: hidden size of a text model; 0: unknown.
        tensor_parallel: counts that a degree of tensor parallelism has to divide; empty: the model has no plan.
        adapters: rank of the adapters that are trained in place of the weights; 0: all weights are trained.
        experts: number of experts of a layer, the greatest common divisor if layers differ; 0: it has none.
        routes: experts of a token.
        first: of the layers outside, those before the units, which the first stage of a pipeline has; None: a pipeline
            cannot cut the model, or it is not known which these are.
        last: those after the units.
    """

    name: str
    units: tuple[UnitSizes, ...]
    outside: UnitSizes
    buffers: int = 0
    tensors: int = 0
    hidden_size: int = 0
    tensor_parallel: tuple[int, ...] = ()
    adapters: int = 0
    experts: int = 0
    routes: int = 0
    first: UnitSizes | None = None
    last: UnitSizes | None = None

    @property
    def layers(self) -> tuple[UnitSizes, ...]:
        """The units, and the layers outside."""
        return (*self.units, self.outside)

    @property
    def parameters(self) -> int:
        """All elements; a tied parameter counts once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable(self) -> int:
        """Elements that are trained."""
        return sum(layer.trainable for layer in self.layers)

    @property
    def factored(self) -> int:
        """Elements of Adafactor's rows and columns."""
        return sum(layer.factored for layer in self.layers)

    @property
    def divisible(self) -> int:
        """Elements that tensor parallelism divides."""
        return sum(layer.divisible for layer in self.layers)

    @property
    def largest_unit(self) -> int:
        """Elements of the largest unit; of the whole model if it has no units."""
        return max((unit.parameters for unit in self.units), default=self.outside.parameters)

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest trained tensor."""
        return max(layer.largest for layer in self.layers)


def shape_of_tensors(
    name: str, shapes: Mapping[str, Sequence[int]], adapters: int = 0, hidden_size: int = 0
) -> ModelShape:
    """Compute the shape of a model from names and shapes of tensors only, such as those in headers of files.

    Repeated blocks are found by the number in their names (``model.layers.3.``).

    Args:
        name: name for reports.
        shapes: shapes by name; tensors of running statistics count as parameters.
        adapters: rank of the adapters at the matrices of the blocks; 0: all weights are trained.
        hidden_size: 0: unknown.
    """
    blocks: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    found = {tensor: _BLOCK.match(tensor) for tensor in shapes}
    roots = Counter(re.sub(r"\d+$", "", match[1]) for match in found.values() if match)
    for tensor, shape in shapes.items():
        match = found[tensor]
        # The longest list of blocks has the model's units; other numbers are parts of them, or of a stem.
        is_block = match is not None and roots[re.sub(r"\d+$", "", match[1])] * 4 >= max(roots.values())
        blocks[match[1] if match is not None and is_block else ""].append(tuple(shape))
    outside = blocks.pop("", [])
    return ModelShape(
        name=name,
        units=tuple(_layer(block, adapters, True) for block in blocks.values()),
        outside=_layer(outside, adapters, False),
        tensors=_trained_tensors(blocks.values(), outside, adapters),
        hidden_size=hidden_size,
        adapters=adapters,
    )


def _trained_tensors(
    blocks: Iterable[list[tuple[int, ...]]], outside: list[tuple[int, ...]], adapters: int
) -> int:
    if adapters:
        return sum(2 * sum(len(shape) == 2 for shape in block) for block in blocks)
    return sum(map(len, blocks)) + len(outside)


def _layer(shapes: list[tuple[int, ...]], adapters: int, is_unit: bool) -> UnitSizes:
    if not adapters:
        sizes = [math.prod(shape) for shape in shapes]
        count = sum(sizes)
        factored = sum(map(factored_size, shapes))
        return UnitSizes(count, count, factored, largest=max(sizes, default=0))
    matrices = [shape for shape in shapes if len(shape) == 2] if is_unit else []
    own = [size * adapters for shape in matrices for size in shape]
    trained = sum(own)
    factored = sum(size + adapters for shape in matrices for size in shape)
    return UnitSizes(sum(map(math.prod, shapes)) + trained, trained, factored, largest=max(own, default=0))


def factored_size(shape: Sequence[int]) -> int:
    """Elements of Adafactor's state for a tensor: rows and columns of a matrix, all elements of other tensors."""
    if len(shape) < 2:
        return math.prod(shape)
    rest = math.prod(shape[:-2])
    return rest * (shape[-2] + shape[-1])
