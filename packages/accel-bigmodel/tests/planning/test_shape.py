"""Counts from names and shapes, and timelines of longer models, by hand."""

import subprocess
import sys

import pytest

from accel_bigmodel.planning.shape import (
    ModelShape,
    Phase,
    Timeline,
    UnitSizes,
    factored_size,
    shape_of_tensors,
)

BLOCKS = {
    f"model.layers.{n}.{name}": shape
    for n in range(12)
    for name, shape in (("attn.weight", (4, 6)), ("mlp.weight", (8, 4)), ("norm.weight", (4,)))
}
OUTSIDE = {"model.embed.weight": (10, 4), "lm_head.bias": (10,), "scale": ()}


@pytest.mark.parametrize(
    ("shape", "size"), [((), 1), ((5,), 5), ((3, 4), 7), ((2, 3, 4), 14), ((2, 5, 3, 4), 70), ((0, 4), 4)]
)
def test_rows_and_columns(shape, size):
    assert factored_size(shape) == size


def test_tensors_of_blocks_and_outside():
    shape = shape_of_tensors("net", BLOCKS | OUTSIDE, hidden_size=4)
    block = UnitSizes(parameters=60, trainable=60, factored=10 + 12 + 4, divisible=0, largest=32)
    assert shape.units == (block,) * 12
    assert shape.outside == UnitSizes(51, 51, 14 + 10 + 1, 0, 40)
    assert (shape.parameters, shape.trainable, shape.factored) == (771, 771, 12 * 26 + 25)
    assert shape.tensors == 39
    assert (shape.largest_unit, shape.largest_tensor, shape.hidden_size) == (60, 40, 4)
    assert (shape.name, shape.adapters, shape.buffers, shape.tensor_parallel) == ("net", 0, 0, ())


def test_adapters_at_the_matrices_of_blocks():
    shape = shape_of_tensors("net", BLOCKS | OUTSIDE, adapters=2)
    # (4, 6) gets (2, 6) and (4, 2), and (8, 4) gets (2, 4) and (8, 2).
    trained = 2 * (4 + 6) + 2 * (8 + 4)
    factored = (6 + 2) + (4 + 2) + (4 + 2) + (8 + 2)
    assert shape.units[0] == UnitSizes(60 + trained, trained, factored, 0, 16)
    assert shape.outside == UnitSizes(51, 0, 0, 0, 0)
    assert (shape.trainable, shape.tensors, shape.adapters) == (12 * trained, 12 * 4, 2)
    assert shape.parameters == 771 + 12 * trained


def test_few_numbers_are_no_units():
    stem = {f"stem.{n}.weight": (2, 2) for n in range(2)}
    shape = shape_of_tensors("net", BLOCKS | stem)
    assert len(shape.units) == 12
    assert shape.outside.parameters == 8
    # A quarter of the tensors of the longest list are enough: an encoder beside a decoder.
    more = {f"encoder.{n}.weight": (2, 2) for n in range(9)}
    assert len(shape_of_tensors("net", BLOCKS | more).units) == 12 + 9


def test_blocks_inside_blocks_belong_to_the_outer_ones():
    experts = {f"layers.{n}.experts.{m}.weight": (3,) for n in range(4) for m in range(5)}
    shape = shape_of_tensors("net", experts)
    assert [unit.parameters for unit in shape.units] == [15] * 4


def test_a_model_without_blocks_or_tensors():
    shape = shape_of_tensors("net", OUTSIDE)
    assert (shape.units, shape.largest_unit) == ((), 51)
    nothing = shape_of_tensors("net", {})
    assert (nothing.parameters, nothing.largest_tensor, nothing.tensors) == (0, 0, 0)
    assert shape_of_tensors("net", OUTSIDE, adapters=4).trainable == 0


def test_the_parts_of_a_model_are_added():
    shape = ModelShape("net", (UnitSizes(5, 4, 3, 2, 1), UnitSizes(7, 6, 5, 4, 3)), UnitSizes(10, 9, 8, 7, 2))
    assert (shape.parameters, shape.trainable, shape.factored, shape.divisible) == (22, 19, 16, 13)
    assert (shape.largest_unit, shape.largest_tensor) == (7, 3)


def test_bytes_of_a_phase():
    assert Phase(0, False, 10, 3, 0, 0).at(4) == 22
    assert Phase(0, False, -10, 3, 0, 0).at(2) == 0  # less than nothing is nothing


def step(units, keeps, fixed=0):
    """The phases of a step in which each unit keeps some bytes per sample until its backward, made one by one."""
    phases, alive, constant = [], 100, 7
    for unit in range(units):
        alive += keeps
        constant += fixed
        phases.append(Phase(unit, False, constant, alive, 0, 0))
    phases.append(Phase(None, False, constant + 1, alive + 50, 50, 0))
    phases.append(Phase(None, True, constant + 2, alive + 60, 60, 40))
    for unit in reversed(range(units)):
        phases.append(Phase(unit, True, constant, alive + 5, 0, 11))
        alive -= keeps
        constant -= fixed
    phases.append(Phase(None, True, constant, alive, 0, 3))
    return Timeline(tuple(phases))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("units", [3, 4])
def test_more_units_are_as_a_longer_model(units, count):
    assert step(units, 8, 3).with_more_units(count) == step(units + count, 8, 3)


def test_the_module_needs_no_torch():
    code = (
        "import sys, importlib.util as u, accel_bigmodel\n"
        "s = u.spec_from_file_location('shape', sys.argv[1]); m = u.module_from_spec(s)\n"
        "sys.modules['shape'] = m; s.loader.exec_module(m); print('torch' in sys.modules)"
    )
    path = sys.modules[ModelShape.__module__].__file__
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
