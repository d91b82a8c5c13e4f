import pytest
import torch

from accel_train import IncompatibleOptionsError, OptionError, TorchTensorParallelPlugin
from accel_train.strategies.tensor_parallel import TensorParallelStrategy


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
