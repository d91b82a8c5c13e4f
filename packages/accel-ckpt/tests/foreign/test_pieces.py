"""Tensors in pieces: whatever the cut, the whole comes back, and a gap or an overlap is found."""

import pytest
import torch

from accel_ckpt import CorruptCheckpointError
from accel_ckpt.foreign.pieces import Piece, PiecedTensor, PiecedWeights

WHOLE = torch.arange(24.0).reshape(4, 6)


def cut(*boxes):
    """Pieces of `WHOLE`: (row, column, rows, columns)."""
    return [
        Piece((r, c), (h, w), lambda r=r, c=c, h=h, w=w: WHOLE[r : r + h, c : c + w].clone())
        for r, c, h, w in boxes
    ]


def tensor(pieces, shape=(4, 6), dtype=torch.float32):
    return PiecedTensor("w", shape, dtype, pieces, "the file")


CUTS = {
    "one": [(0, 0, 4, 6)],
    "rows": [(0, 0, 1, 6), (1, 0, 3, 6)],
    "uneven rows, one empty": [(2, 0, 2, 6), (0, 0, 2, 6), (4, 0, 0, 6)],
    "columns": [(0, 0, 4, 2), (0, 2, 4, 4)],
    "mesh": [(0, 0, 2, 3), (0, 3, 2, 3), (2, 0, 2, 3), (2, 3, 2, 3)],
}


@pytest.mark.parametrize("boxes", CUTS.values(), ids=CUTS)
def test_the_whole_comes_back(boxes):
    found = tensor(cut(*boxes))
    assert torch.equal(found.whole(), WHOLE)
    assert torch.equal(torch.cat([run.reshape(-1) for run in found.runs()]), WHOLE.reshape(-1))
    assert found.nbytes == 96


def test_a_cut_by_rows_is_read_piece_by_piece():
    assert [run.shape[0] for run in tensor(cut(*CUTS["rows"])).runs()] == [1, 3]
    assert len(list(tensor(cut(*CUTS["columns"])).runs())) == 1


def test_scalars_and_empty_tensors():
    scalar = PiecedTensor("s", (), torch.float32, [Piece((), (), lambda: torch.tensor(3.0))], "the file")
    assert scalar.whole() == 3
    empty = PiecedTensor("e", (0, 3), torch.float32, [], "the file")
    assert empty.whole().shape == (0, 3)


@pytest.mark.parametrize(
    "boxes",
    [
        [(0, 0, 3, 6)],
        [(0, 0, 2, 6), (1, 0, 2, 6)],
        [(0, 0, 2, 6), (3, 0, 2, 6)],
        [(0, 0, 4, 3), (0, 2, 4, 3)],
        [(0, 0, 4, 6), (0, 0, 4, 6)],
        [],
    ],
    ids=["gap", "overlap and gap", "outside", "columns overlap", "twice", "none"],
)
def test_pieces_that_do_not_fill_the_tensor(boxes):
    with pytest.raises(CorruptCheckpointError, match=r"the file does not hold the whole tensor 'w'.*rank"):
        tensor(cut(*boxes))


def test_a_piece_that_is_not_what_was_said():
    wrong = [Piece((0, 0), (4, 6), lambda: WHOLE[:2])]
    with pytest.raises(CorruptCheckpointError, match=r"\[4, 6\] of torch.float32, but it is \[2, 6\]"):
        tensor(wrong).whole()
    with pytest.raises(CorruptCheckpointError, match=r"torch.float32, but it is .*torch.float64"):
        tensor([Piece((0, 0), (4, 6), WHOLE.double)]).whole()


def test_weights_know_tied_names():
    weights = PiecedWeights({"a": tensor(cut((0, 0, 4, 6)))}, {"b": "a", "c": "gone"})
    assert set(weights.about) == {"a", "b"}
    assert torch.equal(weights.tensor("b"), WHOLE)


def test_an_expanded_piece_is_refused_before_the_whole_takes_memory():
    size = 1 << 23
    pieces = [
        Piece((row * size, 0), (size, size), lambda: torch.zeros(1).expand(size, size)) for row in range(2)
    ]
    tensor = PiecedTensor("w", (2 * size, size), torch.float32, pieces, "file")
    with pytest.raises(CorruptCheckpointError, match=r"file holds 4 bytes of 'w'"):
        tensor.whole()
