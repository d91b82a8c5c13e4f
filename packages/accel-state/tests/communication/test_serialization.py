import pytest
import torch

from accel_state.communication.serialization import bytes_of, pack, unpack


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(6)[::2],
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.arange(4)[1:3],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.randn(1, 6)[:, 0],
        torch.randn(1, 6)[:, :1],
        torch.randn(0, 6)[:, 0],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=[
        "with gaps",
        "transposed",
        "scalar",
        "empty",
        "part",
        "conjugate",
        "column of one row",
        "one column of one row",
        "column of no rows",
        "expanded",
        "channels last",
        "negative",
    ],
)
def test_any_dense_tensor_survives(leaf):
    assert bytes_of(leaf).numel() == leaf.nbytes
    (back,) = unpack(pack([leaf], torch.device("cpu"), 16)[16:], [leaf])
    assert torch.equal(back, leaf.resolve_conj())
