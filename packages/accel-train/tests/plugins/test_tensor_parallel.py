import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from accel_train import IncompatibleOptionsError, OptionError, TorchTensorParallelPlugin
from accel_train.strategies.tensor_parallel import TensorParallelStrategy
from testkit import worlds


@pytest.mark.parametrize("size", [0, -1, True, "2", 2.0])
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(OptionError, match=rf"tp_size is {size!r}; expected a whole number of at least 1"):
        TorchTensorParallelPlugin(tp_size=size)


def test_it_selects_the_strategy():
    assert TorchTensorParallelPlugin.strategy == TensorParallelStrategy.name
    assert TorchTensorParallelPlugin().tp_size is None


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(IncompatibleOptionsError, match="tp_size=4 does not divide the 6 processes"):
        TensorParallelStrategy.make_mesh(TorchTensorParallelPlugin(tp_size=4), torch.device("cpu"), 6, 0)


def _of_a_mesh(shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        return TorchTensorParallelPlugin(torch_device_mesh=mesh).tp_size
    except OptionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((2,), ("tp",), 2),
        ((1, 2), ("dp", "tp"), 2),
        ((2, 1), ("dp", "tp"), 1),
        ((2, 1), ("dp", "cp"), "expected one dimension, or one called 'tp'"),
    ],
)
def test_a_mesh_of_the_script_gives_the_size(shape, names, expected):
    for found in worlds.run(_of_a_mesh, 2, shape, names):
        assert found == expected or (isinstance(expected, str) and expected in found)


def test_a_mesh_that_contradicts_is_refused():
    class Strided:  # the group of rank 0 where "tp" is the first of two dimensions
        ndim, mesh = 1, torch.tensor([0, 2])

    with pytest.raises(OptionError, match=r"puts the ranks \[0, 2\] in one group"):
        TorchTensorParallelPlugin(torch_device_mesh=Strided())
    Strided.mesh = torch.tensor([2, 3])
    with pytest.raises(
        OptionError, match="tp_size=4 contradicts torch_device_mesh, whose groups have 2 ranks"
    ):
        TorchTensorParallelPlugin(4, Strided())
