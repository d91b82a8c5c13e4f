"""This rank's positions of a batch, against slices of hand-made tensors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accel_train.errors import IncompatibleOptionsError
from accel_train.sequence.batches import ModelFacts, SequencePart, cut_batch
from accel_train.sequence.layout import SequenceLayout

NOTHING = ModelFacts()
CAUSAL = ModelFacts(positions=True, is_causal=True, shifts=True, counts=True)
MASKED = ModelFacts(counts=True)
IDS = torch.arange(16).reshape(2, 8)


def place(index=0, parts=2, length=None):
    return SequencePart(index, parts, "cp_size=2", length)


def cut_all(batch, facts, parts=2):
    return [cut_batch(batch, place(index, parts), facts) for index in range(parts)]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_are_in_order_and_make_up_the_sequence(parts):
    batch = (IDS, {"scores": torch.rand(2, 8, 3), "length": torch.tensor([8, 8]), "kind": "text"})
    found = cut_all(batch, NOTHING, parts)
    share = 8 // parts
    for index, (ids, rest) in enumerate(found):
        assert torch.equal(ids, IDS[:, index * share : (index + 1) * share])
        assert ids.is_contiguous()
        assert torch.equal(rest["scores"], batch[1]["scores"][:, index * share : (index + 1) * share])
        assert rest["length"].tolist() == [8, 8]
        assert rest["kind"] == "text"


def test_balanced_ranks_have_a_piece_from_each_end_which_neighbours_share():
    whole = torch.arange(24).reshape(2, 12)
    layout = SequenceLayout(2, balanced=True)
    found = [cut_batch(whole, SequencePart(index, 4, "", layout=layout), NOTHING) for index in range(4)]
    assert [part[0].tolist() for part in found] == [[0, 1, 2], [9, 10, 11], [3, 4, 5], [6, 7, 8]]


def test_tensors_of_another_second_dimension_stay():
    batch = {"input_ids": IDS, "image": torch.rand(2, 3, 8)}
    found = cut_batch(batch, place(1), NOTHING)
    assert torch.equal(found["image"], batch["image"])
    assert found["input_ids"].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert set(found) == {"input_ids", "image"}, "the model takes nothing else"
    # the length is that of the tokens, whatever comes first
    found = cut_batch({"image": torch.rand(2, 3, 8), "input_ids": IDS}, place(), NOTHING)
    assert found["image"].shape == (2, 3, 8)


def test_positions_are_those_of_the_whole_sequence():
    facts = ModelFacts(positions=True)
    for index, found in enumerate(cut_all({"input_ids": IDS}, facts)):
        assert found["position_ids"].tolist() == [list(range(index * 4, index * 4 + 4))] * 2
    for index, found in enumerate(cut_all({"inputs_embeds": torch.rand(2, 8, 3)}, facts)):
        assert found["position_ids"].tolist() == [list(range(index * 4, index * 4 + 4))] * 2
    own = torch.arange(8).flip(0).expand(2, 8)
    found = cut_batch({"input_ids": IDS, "position_ids": own}, place(1), facts)
    assert found["position_ids"].tolist() == [[3, 2, 1, 0]] * 2


def test_positions_that_count_from_the_token_of_padding():
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 1]])
    facts = ModelFacts(positions=True, padding=1)
    assert [part["position_ids"].tolist() for part in cut_all({"input_ids": ids}, facts)] == [
        [[2, 3, 4, 5]],
        [[6, 7, 8, 1]],
    ]
    embeds = {"inputs_embeds": torch.rand(1, 8, 3)}
    assert cut_batch(embeds, place(1), facts)["position_ids"].tolist() == [[6, 7, 8, 9]]


def test_lengths_at_which_rotary_factors_depend_on_the_rank():
    assert cut_batch({"input_ids": IDS}, place(), ModelFacts(longest=8))["input_ids"].shape == (2, 4)
    with pytest.raises(
        IncompatibleOptionsError, match=r"8 positions.*'longrope'.*more than 7.*cp_size=2.*at most 7"
    ):
        cut_batch({"input_ids": IDS}, place(), ModelFacts(longest=7))


def test_the_mean_over_ranks_is_the_loss_of_the_whole_batch():
    """The labels of a rank's last position are on the next rank; ranks hold different numbers of them."""
    torch.manual_seed(0)
    logits = torch.randn(2, 8, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (2, 8))
    labels[0, 2:] = -100
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    found = cut_all({"input_ids": IDS, "labels": labels}, CAUSAL, 4)
    losses = []
    for part, mine in zip(found, logits.chunk(4, 1), strict=True):
        total = cross_entropy(mine.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum")
        losses.append(total / part["num_items_in_batch"])
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
    assert found[0]["num_items_in_batch"].item() == (1 + 7) / 4


def test_masked_models_predict_in_place():
    labels = torch.full((2, 8), -100)
    labels[0, 5] = 3
    found = cut_batch({"input_ids": IDS, "labels": labels}, place(1), MASKED)
    assert "shift_labels" not in found
    assert found["labels"].tolist() == [[-100, 3, -100, -100], [-100] * 4]
    assert found["num_items_in_batch"].item() == 0.5


def test_what_the_script_gives_itself_is_kept():
    labels = torch.zeros(2, 8, dtype=torch.int64)
    shifted = torch.full((2, 8), -100)
    shifted[0, :3] = 1
    found = cut_batch({"input_ids": IDS, "labels": labels, "shift_labels": shifted}, place(), CAUSAL)
    assert found["shift_labels"].tolist() == [[1, 1, 1, -100], [-100] * 4]
    assert found["num_items_in_batch"].item() == 1.5, "counted in the labels that the loss reads"
    given = cut_batch({"input_ids": IDS, "labels": labels, "num_items_in_batch": 7}, place(), CAUSAL)
    assert given["num_items_in_batch"] == 7


def test_a_batch_without_labels_that_count_divides_by_one():
    labels = torch.full((2, 8), -100)
    found = cut_batch({"input_ids": IDS, "labels": labels}, place(), CAUSAL)
    assert found["num_items_in_batch"].item() == 0.5
    of_sequences = cut_batch({"input_ids": IDS, "labels": torch.tensor([0, 1])}, place(), CAUSAL)
    assert of_sequences["labels"].tolist() == [0, 1]
    assert "num_items_in_batch" not in of_sequences


def test_masks_that_can_be_left_out():
    ones = torch.ones(2, 8, dtype=torch.int64)
    right = ones.clone()
    right[1, 5:] = 0
    batch = {"input_ids": IDS, "attention_mask": right}
    assert "attention_mask" not in cut_batch(batch, place(), CAUSAL)
    assert "attention_mask" in batch, "the script's batch stays as it was"
    assert "attention_mask" not in cut_batch({**batch, "attention_mask": ones}, place(), MASKED)
    assert "attention_mask" not in cut_batch({**batch, "attention_mask": None}, place(), MASKED)


def test_masks_that_are_needed_are_refused():
    left = torch.ones(2, 8)
    left[1, :2] = 0
    with pytest.raises(IncompatibleOptionsError, match=r"padding before the positions.*cp_size=2.*right"):
        cut_batch({"input_ids": IDS, "attention_mask": left}, place(), CAUSAL)
    right = left.flip(1)
    with pytest.raises(IncompatibleOptionsError, match=r"padding among the positions.*full length"):
        cut_batch({"input_ids": IDS, "attention_mask": right}, place(), MASKED)
    with pytest.raises(IncompatibleOptionsError, match=r"attention_mask of shape \(2, 1, 8, 8\)"):
        cut_batch({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)}, place(), CAUSAL)


def test_lengths_that_cannot_be_divided():
    with pytest.raises(IncompatibleOptionsError, match=r"8 positions, which cp_size=2 cannot divide into 3"):
        cut_batch(IDS, place(parts=3), NOTHING)
    two = SequencePart(0, 6, "cp_size=3 and sp_size=2", layout=SequenceLayout(3, balanced=True))
    with pytest.raises(
        IncompatibleOptionsError,
        match=r"9 positions, which .* into 6 equal parts. Pad them to a multiple of 6, as `pad_to_multiple_of=6`",
    ):
        cut_batch(torch.ones(2, 9), two, NOTHING)
    pieces = SequencePart(0, 3, "cp_size=3", layout=SequenceLayout(3, balanced=True))
    told = r"9 positions.*of two pieces; with cp_load_balance=False, multiples of 3 can.*a multiple of 6"
    with pytest.raises(IncompatibleOptionsError, match=told):
        cut_batch(torch.ones(2, 9), pieces, NOTHING)
    with pytest.raises(IncompatibleOptionsError, match=r"8 positions, but sp_seq_length is 16"):
        cut_batch(IDS, place(length=16), NOTHING)
    assert cut_batch(IDS, place(length=8), NOTHING).shape == (2, 4)
    for batch in (torch.ones(4), {"kind": "text"}, []):
        with pytest.raises(IncompatibleOptionsError, match=rf"\({type(batch).__name__}\) has no tensor"):
            cut_batch(batch, place(), NOTHING)


def ForCausalLMLoss(): ...


def ForMaskedLMLoss(): ...


class Plain(nn.Module):
    def forward(self, x): ...


class Causal(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def forward(self, input_ids, position_ids=None, **kwargs): ...


class Masked(nn.Module):
    loss_function = staticmethod(ForMaskedLMLoss)

    def forward(self, input_ids, **kwargs): ...


class Adapted(nn.Module):
    """As models of PEFT, which pass keyword arguments on."""

    loss_function = staticmethod(ForCausalLMLoss)

    def get_base_model(self):
        return Causal()

    def forward(self, input_ids=None, labels=None, **kwargs): ...


class Fixed(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def forward(self, input_ids): ...


class Own(nn.Module):
    """A model of the script that names what it needs."""

    def forward(
        self, input_ids, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None
    ): ...


class Numbered(nn.Module):
    """As RoBERTa, whose table of positions has a row for padding."""

    def __init__(self):
        super().__init__()
        self.position_embeddings = nn.Embedding(8, 4, padding_idx=1)

    def forward(self, x): ...


class Config:
    max_position_embeddings = 64

    def __init__(self, rope):
        self.rope_parameters = rope


class Rotary(nn.Module):
    def __init__(self, **rope):
        super().__init__()
        self.config = Config(rope)

    def forward(self, x): ...


class Unsure(nn.Module):
    def forward(self, input_ids, labels=None): ...


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Plain(), set()),
        (Causal(), {"positions", "is_causal", "shifts", "counts"}),
        (Adapted(), {"positions", "is_causal", "shifts", "counts"}),
        (Masked(), {"averages"}),  # not all forwards of its kind divide by num_items_in_batch
        (Fixed(), {"is_causal"}),  # it takes neither
        (Own(), {"positions", "is_causal", "shifts", "counts"}),
        (Unsure(), {"may_shift"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_facts_of_a_model(model, expected):
    assert {name for name, value in vars(ModelFacts.of(model)).items() if value} == expected


def test_the_token_of_padding_and_the_longest_sequence_of_a_model():
    assert ModelFacts.of(Numbered()).padding == 1
    assert ModelFacts.of(Rotary(rope_type="llama3", original_max_position_embeddings=8)).longest is None
    assert ModelFacts.of(Rotary(rope_type="longrope", original_max_position_embeddings=8)).longest == 8
    assert ModelFacts.of(Rotary(rope_type="dynamic", factor=2.0)).longest == 64
    of_kinds = Rotary(full_attention={"rope_type": "longrope", "original_max_position_embeddings": 16})
    assert ModelFacts.of(of_kinds).longest == 16
