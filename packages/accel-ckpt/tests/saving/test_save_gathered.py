import pickle

import torch

from accel_ckpt import Part, gather_whole


class Counting:
    """One rank that counts the bytes it sends."""

    rank = local_rank = 0
    world_size = 1

    def __init__(self):
        self.sent = 0

    def exchange(self, value):
        blob = pickle.dumps(value)
        self.sent += len(blob)
        return [pickle.loads(blob)]


def test_of_parts_that_are_views_only_their_own_elements_are_sent():
    flat = torch.arange(1 << 18, dtype=torch.float32)  # a partition of many parameters, as ZeRO has it
    ranks = Counting()
    leaf = Part.of_flat(flat[1000:1024], 0, (6, 4))
    assert torch.equal(gather_whole(leaf, ranks), flat[1000:1024].view(6, 4))
    assert ranks.sent < 4096


def test_what_is_gathered_is_a_copy():
    values = torch.zeros(4)
    gather_whole([Part(values, (0,), (4,))], Counting()).fill_(1)
    assert torch.equal(values, torch.zeros(4))
