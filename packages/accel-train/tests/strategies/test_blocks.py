"""Which modules of a model repeat."""

import pytest
from torch import nn

from accel_train.strategies.blocks import repeated_blocks


def layers(*kinds):
    return nn.ModuleList([kind(2, 2) for kind in kinds])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(2, 2), []),
        (nn.ModuleDict({"empty": nn.ModuleList()}), []),
        (nn.ModuleDict({"mixed": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])}), []),
        (nn.ModuleDict({"one": layers(nn.Linear)}), ["one.0"]),
        (nn.ModuleDict({"deep": nn.ModuleDict({"two": layers(nn.Linear, nn.Linear)})}), ["deep.two.0", "deep.two.1"]),
        # a list inside a mixed list is found, one inside a block is part of the block
        (nn.ModuleDict({"mixed": nn.ModuleList([nn.ReLU(), layers(nn.Linear)])}), ["mixed.1.0"]),
        (nn.ModuleDict({"outer": nn.ModuleList([layers(nn.Linear), layers(nn.Linear)])}), ["outer.0", "outer.1"]),
    ],
)  # fmt: skip
def test_repeated_blocks_are_members_of_the_outermost_lists_of_one_class(model, expected):
    named = dict(model.named_modules())
    assert repeated_blocks(model) == [named[name] for name in expected]
