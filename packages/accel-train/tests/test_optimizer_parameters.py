"""The parameters of optimizers, across their groups."""

import torch
from torch import nn

from accel_train.optimizer_parameters import parameter_ids, parameters_of


def test_all_groups_of_all_optimizers_in_order():
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    one = torch.optim.SGD([{"params": [second]}, {"params": [first]}], lr=0.1)
    other = torch.optim.SGD([third], lr=0.1)
    assert [id(parameter) for parameter in parameters_of(one, other)] == [id(second), id(first), id(third)]
    assert parameter_ids(one, other) == {id(first), id(second), id(third)}
    assert parameter_ids() == set()
