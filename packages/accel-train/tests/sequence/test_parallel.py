"""Models over divided sequences, against the same models in one process on whole sequences."""

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_state import PartialState
from accel_train.errors import IncompatibleOptionsError, OptionError, PrepareError
from accel_train.mesh import Mesh
from accel_train.sequence.parallel import SequenceParallel
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return x + self.mlp(F.gelu(self.attention(self.norm(x))))


class Model(nn.Module):
    """Takes positions, as a model must whose sequences are divided."""

    def __init__(self, again=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 30)
        self.again = again

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def built(again=False):
    torch.manual_seed(3)
    return Model(again).double()


def batches(step, length=16):
    made = torch.Generator().manual_seed(step)
    return {
        "input_ids": torch.randint(30, (2, length), generator=made),
        "targets": torch.randint(30, (2, length), generator=made),
    }


def loss_of(model, batch):
    return F.cross_entropy(
        model(batch["input_ids"], batch["position_ids"]).flatten(0, 1), batch["targets"].flatten()
    )


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def mesh_of(degrees):
    state = PartialState(cpu=True)
    return Mesh(degrees, "cpu", state.num_processes, state.process_index)


def trained(degrees, rotation, again, balanced):
    sequence = SequenceParallel(mesh_of(degrees), rotation, balanced=balanced)
    model = sequence.prepare(built(again))
    other = built()  # a model that is not prepared computes as ever, also now
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        batch = sequence.shard_batch(batches(step))
        loss = loss_of(model, batch)
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        whole = {**batches(step), "position_ids": torch.arange(16).expand(2, 16)}
        assert loss_of(other, whole).isfinite()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), [p.detach() for p in model.parameters()]


def in_one_process():
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss = loss_of(model, {**batches(step), "position_ids": torch.arange(16).expand(2, 16)})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("degrees", "rotation", "again", "balanced"),
    [
        ({"sp": 2}, "allgather", False, True),
        pytest.param({"sp": 2}, "allgather", True, True, marks=pytest.mark.full),
        ({"cp": 2}, "allgather", False, True),
        ({"cp": 2}, "alltoall", True, True),
        ({"cp": 2}, "alltoall", False, False),
        pytest.param({"cp": 4}, "allgather", True, True, marks=pytest.mark.full),
        pytest.param({"cp": 4}, "alltoall", False, True, marks=pytest.mark.full),
        ({"cp": 2, "sp": 2}, "alltoall", False, True),
    ],
    ids=str,
)
def test_training_is_that_of_one_process(degrees, rotation, again, balanced):
    expected_loss, expected = in_one_process()
    for loss, found in worlds.run(trained, math.prod(degrees.values()), degrees, rotation, again, balanced):
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def llama(kind="llama", **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, **heads, attn_implementation="sdpa", **more)
        return transformers.LlamaForCausalLM(config).double()
    sizes.pop("intermediate_size")
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def text(padded):
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(60, (3, 16), generator=made)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if padded:
        labels[0, 11:] = -100
        labels[1, 5:] = -100
        mask = (labels != -100).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def language_model(kind, degrees, again):
    sequence = SequenceParallel(mesh_of(degrees))
    found = []
    for padded in (False, True):
        model = llama(kind)
        if again:
            model.gradient_checkpointing_enable()
        model = sequence.prepare(model)
        batch = sequence.shard_batch(text(padded))
        assert "attention_mask" not in batch
        loss = model(**batch).loss
        loss.backward()
        average(model)
        dist.all_reduce(loss)
        found.append((loss.item() / dist.get_world_size(), [p.grad for p in model.parameters()]))
    return found


@pytest.mark.parametrize(
    ("kind", "degrees", "again"),
    [
        pytest.param("llama", {"sp": 2}, False, marks=pytest.mark.full),
        ("llama", {"cp": 2}, True),
        pytest.param("gpt2", {"cp": 2}, False, marks=pytest.mark.full),
        ("gpt2", {"sp": 2}, False),
    ],
    ids=str,
)
def test_losses_and_gradients_of_language_models(kind, degrees, again):
    pytest.importorskip("transformers")
    ranks = worlds.run(language_model, 2, kind, degrees, again)
    for padded in (False, True):
        # Models of transformers compute their loss in float32, whatever they are in.
        whole = llama(kind)
        loss = whole(**text(padded)).loss
        loss.backward()
        for found in ranks:
            near, gradients = found[padded]
            assert near == pytest.approx(loss.item(), abs=2e-6)
            torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()], rtol=0, atol=1e-7)


def predicting_in_place(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 40, "attn_implementation": "sdpa"}
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    if kind == "llama tokens":
        config = transformers.LlamaConfig(**sizes, num_labels=3, classifier_dropout=0)
        return transformers.LlamaForTokenClassification(config).double()
    if kind == "roberta":
        config = transformers.RobertaConfig(**sizes, **none, pad_token_id=1)
        return transformers.RobertaForMaskedLM(config).double()
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **none)).double()


def labels_in_place():
    """Ranks count different numbers of labels; the parts of the last have none."""
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 60, (3, 16), generator=made)
    labels = torch.full_like(ids, -100)
    labels[:, 1:3], labels[0, 13:] = 1, 2
    return ids, labels, labels.index_fill(1, torch.arange(4, 12), -100).index_fill(1, torch.arange(4), -100)


def losses_in_place(kind, degrees):
    sequence = SequenceParallel(mesh_of(degrees), balanced=False)
    model = sequence.prepare(predicting_in_place(kind))
    ids, *several = labels_in_place()
    found = []
    for labels, whole in itertools.product(several, (True, False)):
        model.zero_grad()
        output = model(**sequence.shard_batch({"input_ids": ids, "labels": labels}), return_dict=whole)
        loss = output.loss if whole else output[0]
        loss.backward()
        average(model)
        dist.all_reduce(loss)
        found.append((loss.item() / dist.get_world_size(), [p.grad.clone() for p in model.parameters()]))
    return found


@pytest.mark.wide(only=["roberta-*"])
@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("bert", {"cp": 2}),
        ("llama tokens", {"sp": 2}),
        ("roberta", {"cp": 2}),
    ],
    ids=str,
)
def test_losses_of_models_that_predict_in_place(kind, degrees):
    pytest.importorskip("transformers")
    model = predicting_in_place(kind)
    ids, *several = labels_in_place()
    expected = []
    for labels in several:
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        expected += [(loss.item(), [p.grad.clone() for p in model.parameters()])] * 2
    for rank in worlds.run(losses_in_place, 2, kind, degrees):
        for (near, gradients), (exact, wanted) in zip(rank, expected, strict=True):
            assert near == pytest.approx(exact, abs=2e-6)
            torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-6)


def compiled_blocks(degrees):
    sequence = SequenceParallel(mesh_of(degrees))
    model = built()
    for block in model.blocks:
        block.compile(backend="eager")
    model = sequence.prepare(model)
    loss = loss_of(model, sequence.shard_batch(batches(0)))
    loss.backward()
    average(model)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), [p.grad for p in model.parameters()]


@pytest.mark.wide(only=["{'cp': 2}"])
@pytest.mark.parametrize("degrees", [{"sp": 2}, {"cp": 2}], ids=str)
def test_compiled_blocks_divide_attention_once(degrees):
    model = built()
    loss = loss_of(model, {**batches(0), "position_ids": torch.arange(16).expand(2, 16)})
    loss.backward()
    for near, gradients in worlds.run(compiled_blocks, 2, degrees):
        assert near == pytest.approx(loss.item(), abs=1e-12)
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=0, atol=1e-12)


class Core(nn.Module):
    """Attention without parameters, which is checkpointed alone."""

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class CoreAgain(Attention):
    def __init__(self):
        super().__init__()
        self.core = Core()

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.out(checkpoint(self.core, *heads, use_reentrant=False).transpose(1, 2).flatten(2))


def built_with_cores():
    model = built()
    for block in model.blocks:
        again = CoreAgain().double()
        again.load_state_dict(block.attention.state_dict())
        block.attention = again
    return model


def cores(degrees):
    sequence = SequenceParallel(mesh_of(degrees))
    model = sequence.prepare(built_with_cores())
    loss_of(model, sequence.shard_batch(batches(0))).backward()
    average(model)
    return [p.grad for p in model.parameters()]


def test_attention_that_is_checkpointed_alone_is_divided_again():
    model = built_with_cores()
    loss_of(model, {**batches(0), "position_ids": torch.arange(16).expand(2, 16)}).backward()
    for gradients in worlds.run(cores, 2, {"sp": 2}):
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=0, atol=1e-12)


LENGTHS = ((8, 8), (5, 7, 4))
"""Of documents in two sequences; in the first a document ends where the part of a rank may end."""


def packed_batch(step=0):
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS]
    return {**batches(step), "position_ids": torch.stack(positions)}


def packed_text():
    """As transformers' DataCollatorWithFlattening makes it."""
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(60, (1, 16), generator=made)
    positions = torch.cat([torch.arange(length) for length in LENGTHS[1]])[None]
    return {"input_ids": ids, "labels": ids.where(positions > 0, -100), "position_ids": positions}


def apart(batch):
    """Each document as a batch of one sequence."""
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in itertools.pairwise(starts):
            yield {name: value[row : row + 1, start:end] for name, value in batch.items()}


def packed(degrees, again, balanced, kind):
    sequence = SequenceParallel(mesh_of(degrees), balanced=balanced)
    if kind == "own":
        model = sequence.prepare(built(again))
        loss_of(model, sequence.shard_batch(batches(1))).backward()  # without documents
        model.zero_grad()
        loss = loss_of(model, sequence.shard_batch(packed_batch()))
    else:
        model = llama()
        if again:
            model.gradient_checkpointing_enable()
        model = sequence.prepare(model)
        loss = model(**sequence.shard_batch(packed_text())).loss
    loss.backward()
    average(model)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("degrees", "again", "balanced", "kind"),
    [
        ({"cp": 2}, True, True, "own"),
        ({"cp": 2}, False, False, "own"),
        ({"sp": 2}, False, True, "own"),
        ({"cp": 2}, True, True, "llama"),
        pytest.param({"sp": 2}, True, True, "own", marks=pytest.mark.full),
        pytest.param({"sp": 2}, False, True, "llama", marks=pytest.mark.full),
        pytest.param({"cp": 2, "sp": 2}, False, True, "own", marks=pytest.mark.full),
        pytest.param({"cp": 4}, True, True, "llama", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_documents_of_one_sequence_are_as_if_apart(degrees, again, balanced, kind):
    if kind == "own":
        model, total = built(), 0
        for document in apart(packed_batch()):
            total = total + loss_of(model, document) * document["targets"].numel() / 32
    else:
        pytest.importorskip("transformers")
        model, total = llama(), 0
        for document in apart(packed_text()):
            total = total + model(**document).loss * (document["input_ids"].numel() - 1) / 13
    total.backward()
    bound = 1e-12 if kind == "own" else 1e-7  # models of transformers compute their loss in float32
    ranks = math.prod(degrees.values())
    for loss, gradients in worlds.run(packed, ranks, degrees, again, balanced, kind):
        assert loss == pytest.approx(total.item(), abs=20 * bound)
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=0, atol=bound)


class Reentrant(Model):
    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class Placeless(Model):
    def forward(self, input_ids):
        return super().forward(input_ids, torch.arange(input_ids.shape[1]).expand_as(input_ids))


def packed_refusals(degrees):
    told = []

    def refused(call, kind):
        with pytest.raises(kind) as error:
            call()
        told.append(str(error.value))

    sequence = SequenceParallel(mesh_of(degrees))
    model = sequence.prepare(Reentrant().double())
    loss = loss_of(model, sequence.shard_batch(packed_batch()))
    refused(loss.backward, PrepareError)
    without = {**batches(0), "cu_seq_lens_q": torch.tensor([0, 8, 16, 21, 28, 32])}
    refused(lambda: sequence.shard_batch(without), IncompatibleOptionsError)
    sequence = SequenceParallel(mesh_of(degrees))
    assert "input_ids" in sequence.shard_batch(packed_batch()), "no model is known yet"
    sequence.prepare(Placeless())
    refused(lambda: sequence.shard_batch(packed_batch()), IncompatibleOptionsError)
    return told


def test_documents_that_a_model_cannot_keep_apart_are_refused():
    for reentrant, boundaries, placeless in worlds.run(packed_refusals, 2, {"cp": 2}):
        assert "Attention runs by itself" in reentrant
        assert "use_reentrant=False" in reentrant
        assert "'cu_seq_lens_q'" in boundaries
        assert "no position_ids, from which cp_size 2 reads where a document begins" in boundaries
        assert "the model's forward has no argument position_ids" in placeless


def refusals(degrees):
    sequence = SequenceParallel(mesh_of(degrees), length=None)
    told = {}

    def refused(name, call, kind=IncompatibleOptionsError):
        try:
            call()
        except kind as error:
            told[name] = str(error)

    refused("length", lambda: sequence.shard_batch(batches(0, 15)))
    refused("no sequence", lambda: sequence.shard_batch({"x": torch.ones(3)}))
    refused("multihead", lambda: sequence.prepare(nn.Sequential(nn.MultiheadAttention(8, 2))))
    model = sequence.prepare(nn.Sequential(nn.Linear(4, 4)))
    refused("no attention", lambda: model(torch.ones(2, 4, 4)), PrepareError)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, heads=4, **more):
            query = self.inner(x).unsqueeze(1).expand(-1, heads, -1, -1)
            return F.scaled_dot_product_attention(query, query, query, **more)

    masked = sequence.prepare(Masked())
    refused("mask", lambda: masked(torch.ones(2, 4, 4), attn_mask=torch.ones(4, 4).bool()))
    refused("heads", lambda: masked(torch.ones(2, 4, 4), heads=3))
    assert masked(torch.ones(2, 4, 4)).shape == (2, 4, 4, 4), "an error leaves nothing behind"
    fixed = SequenceParallel(mesh_of(degrees), length=16)
    refused("fixed", lambda: fixed.shard_batch(batches(0, 32)))
    return told


def test_what_cannot_be_divided_is_refused():
    for told in worlds.run(refusals, 2, {"sp": 2}):
        assert (
            "15 positions, which sp_size 2 cannot divide into 2 equal parts. Pad them to a multiple of 2"
            in told["length"]
        )
        assert "no tensor of the shape (samples, positions, …)" in told["no sequence"]
        assert "'0' is a torch.nn.MultiheadAttention" in told["multihead"]
        assert "without a call of torch.nn.functional.scaled_dot_product_attention" in told["no attention"]
        assert "mask of shape (4, 4)" in told["mask"]
        assert "sp_size 2 does not divide the 3 attention heads" in told["heads"]
        assert "sequences of 32 positions, but sp_seq_length is 16" in told["fixed"]


def transformers_refusals(degrees):
    transformers = pytest.importorskip("transformers")
    sequence = SequenceParallel(mesh_of(degrees))
    told = []
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    eager = transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager")
    narrow = transformers.MistralConfig(**sizes, **heads, sliding_window=4, attn_implementation="sdpa")
    for config in (eager, narrow):
        model = transformers.AutoModelForCausalLM.from_config(config)
        try:
            sequence.prepare(model)
        except IncompatibleOptionsError as error:
            told.append(str(error))
    sequence.prepare(llama())
    batch = text(True)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    try:
        sequence.shard_batch(batch)
    except IncompatibleOptionsError as error:
        told.append(str(error))
    return told


def test_transformers_models_that_need_a_mask_are_refused():
    pytest.importorskip("transformers")
    for told in worlds.run(transformers_refusals, 2, {"cp": 2}):
        assert "attends by 'eager'; cp_size 2 divides 'sdpa' alone" in told[0]
        assert "sliding_attention" in told[1]
        assert "Pad causal language models on the right" in told[2]


def heads_of_whole_sequences(degrees):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "attn_implementation": "sdpa"}
    llama, bert = transformers.LlamaConfig(**sizes), transformers.BertConfig(**sizes)
    sequence = SequenceParallel(mesh_of(degrees))
    refused = (
        transformers.LlamaForSequenceClassification(llama),
        transformers.BertForQuestionAnswering(bert),
        transformers.BertForMultipleChoice(bert),
        transformers.BertForNextSentencePrediction(bert),
        transformers.BertForPreTraining(bert),
    )
    for model in refused:
        told = rf"of {type(model).__name__} \(loss_type .*\) cannot be computed from parts .* cp_size 2 gives"
        with pytest.raises(IncompatibleOptionsError, match=told):
            sequence.prepare(model)
    for model in (transformers.LlamaModel(llama), transformers.BertModel(bert)):
        sequence.prepare(model)
    return True


def test_transformers_models_with_heads_over_whole_sequences_are_refused():
    pytest.importorskip("transformers")
    assert all(worlds.run(heads_of_whole_sequences, 2, {"cp": 2}))


def counting_from_their_part(degrees):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 1}
    sizes |= {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}

    class ShiftsItself(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, labels=None, **kwargs):
            logits = super().forward(input_ids, position_ids=position_ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    t5 = transformers.T5Config(vocab_size=60, d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=4)
    sequence, told = SequenceParallel(mesh_of(degrees)), []
    for model in (
        transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)),
        transformers.MarianMTModel(transformers.MarianConfig(**sizes)),
        transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes)),
        transformers.BartModel(transformers.BartConfig(**sizes)),
        transformers.T5ForConditionalGeneration(t5),
        transformers.BartForCausalLM(transformers.BartConfig(**sizes)),
        transformers.MarianForCausalLM(transformers.MarianConfig(**sizes)),
        ShiftsItself(llama().config),
    ):
        before = dict(model._forward_pre_hooks)
        with pytest.raises(IncompatibleOptionsError) as caught:
            sequence.prepare(model)
        assert model._forward_pre_hooks == before
        told.append(str(caught.value))
    return told


@pytest.mark.wide(only=["sp"])
@pytest.mark.parametrize("degrees", [{"cp": 2}, {"sp": 2}], ids=["cp", "sp"])
def test_transformers_models_that_count_from_their_part_are_refused(degrees):
    pytest.importorskip("transformers")
    for told in worlds.run(counting_from_their_part, 2, degrees):
        assert all(
            "it has an encoder and a decoder, and makes the decoder's inputs" in text for text in told[:5]
        )
        assert all("its forward takes no position_ids" in text for text in told[5:7])
        assert "its forward gives its loss no shift_labels" in told[7]


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.pointwise = Attention(), nn.Conv1d(16, 16, 1)
        self.joined, self.state = nn.Conv1d(16, 16, 3), nn.GRU(16, 16)


def warnings_of_preparing(degrees):
    sequence = SequenceParallel(mesh_of(degrees))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sequence.prepare(Neighbours())
    other = SequenceParallel(mesh_of(degrees))
    other.prepare(built())
    with warnings.catch_warnings(record=True) as late:
        warnings.simplefilter("always")
        for _ in range(2):
            other.shard_batch(batches(0))
            other.shard_batch({"tokens": torch.ones(2, 16), "position_ids": torch.ones(2, 16)})
        assert not late
        for _ in range(2):
            other.shard_batch((torch.ones(2, 16), torch.ones(2, 16)))
    return [[str(each.message) for each in found] for found in (seen, late)]


def test_what_may_see_its_rank_alone_is_warned_of():
    (neighbours, form), other = worlds.run(warnings_of_preparing, 2, {"cp": 2})
    assert len(neighbours) == len(form) == 1
    assert "Neighbours has 'joined' (Conv1d) and 1 others" in neighbours[0]
    assert "cp_size 2" in neighbours[0]
    assert "takes position_ids, of which cp_size 2 gives" in form[0]
    assert "this batch is a tuple" in form[0]
    assert other == [[], []]


def buffers(degrees):
    sequence = SequenceParallel(mesh_of(degrees))
    mine = sequence.shard_batch({"input_ids": torch.arange(32).view(2, 16)})["input_ids"]
    other, kept = torch.arange(16).view(16, 1), torch.arange(16)
    before = copy.copy(other)
    with sequence.cut_buffers([mine, other, kept], [1, 0, 0], kept=[kept]):
        inside = (mine.shape, other.flatten().tolist(), kept.tolist())
    assert torch.equal(other, before)
    with (
        pytest.raises(OptionError, match="1 buffers and 2 buffer_seq_dims"),
        sequence.cut_buffers([mine], [0, 1]),
    ):
        pass
    return inside, kept.tolist()


def test_buffers_are_cut_while_the_context_lasts():
    found = worlds.run(buffers, 2, {"cp": 2})
    for rank, (inside, kept) in enumerate(found):  # a piece from each end
        part = [*range(4 * rank, 4 * rank + 4), *range(12 - 4 * rank, 16 - 4 * rank)]
        assert inside == ((2, 8), part, part)
        assert kept == part


# Models of the script's own that predict the next token


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.head = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Linear(8, 20)
        self.double()

    def logits(self, input_ids, position_ids):
        x = (self.embed(input_ids) + self.place(position_ids))[:, None]
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])


class Named(Own):
    """Its forward names all that it cannot know from a part of a sequence."""

    def forward(self, input_ids, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None):
        logits = self.logits(input_ids, position_ids).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum")
        return total / num_items_in_batch


class Shifting(Own):
    """It does not say that it shifts labels itself."""

    def forward(self, input_ids, position_ids=None, labels=None):
        logits = self.logits(input_ids, position_ids)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def loss_of_own(kind, divided=False):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    ids = torch.randint(0, 20, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted = Shifting()(ids, torch.arange(16).expand(2, 16), ids)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin() if divided else None,
    )
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, loader = accelerator.prepare(kind(), loader)
    told = [str(each.message) for each in seen if "takes labels, which cp_size 2 cuts" in str(each.message)]
    [loss] = [accelerator.reduce(model(**batch).detach(), "mean") for batch in loader]
    return loss.item(), wanted.item(), len(told)


@pytest.mark.wide(but=["False"])
@pytest.mark.parametrize("divided", [False, True])
def test_a_model_that_names_shifted_labels_has_the_loss_of_one_process(divided):
    for loss, wanted, told in worlds.run(loss_of_own, 2, Named, divided):
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert not told


def test_a_model_that_may_shift_labels_itself_is_told_of():
    (loss, wanted, told), (*_, other) = worlds.run(loss_of_own, 2, Shifting)
    assert loss != pytest.approx(wanted, rel=1e-3), "it compares some positions with wrong tokens"
    assert (told, other) == (1, 0)


class Averaging(Named):
    """It averages over the labels of its rank."""

    def forward(self, input_ids, position_ids=None, labels=None, shift_labels=None):
        return nn.functional.cross_entropy(
            self.logits(input_ids, position_ids).flatten(0, 1), shift_labels.flatten()
        )


class Counting(Own):
    """It counts positions itself, from parameters that begin as zeros."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.place.weight)

    def forward(self, idx):
        return self.logits(idx, torch.arange(idx.shape[1]).expand_as(idx))


def training_of_own(kind):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sequence = SequenceParallel(mesh_of({"cp": 2}))
        model = sequence.prepare(kind())
    told = [str(each.message) for each in seen if "num_items_in_batch too" in str(each.message)]
    if kind is Averaging:
        return told, None
    ids = sequence.shard_batch(torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(1)))
    for step in range(1, 20):
        try:
            model(ids).square().mean().backward()
        except PrepareError as error:
            return step, str(error)
        with torch.no_grad():
            model.place.weight -= 0.1 * model.place.weight.grad
    return None, None


def test_a_model_that_averages_over_the_labels_of_a_rank_is_told_of():
    assert [len(told) for told, _ in worlds.run(training_of_own, 2, Averaging)] == [1, 0]


def test_a_model_that_counts_positions_is_refused_on_all_ranks_once_these_are_more_than_zeros():
    for step, told in worlds.run(training_of_own, 2, Counting):
        assert step == 16
        assert "Counting computes something else for the same positions in another order" in told
