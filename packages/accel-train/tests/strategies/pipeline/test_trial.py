"""A cut of a model in the style of transformers is refused if stages would compute something else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_train.errors import PrepareError
from accel_train.plugins import PipelineParallelConfig
from accel_train.strategies.pipeline.cut import cut_model
from accel_train.strategies.pipeline.schedules import StageLayout, run_forward
from accel_train.strategies.pipeline.stages import make_stages
from accel_train.strategies.pipeline.trial import try_cut
from testkit.language_models import config_of

WIDTH, TOKENS = 8, 11
MODULES = ["embed", "layers", "norm", "head"]


class Config:
    pass


class Net(nn.Module):
    """The parts of a model of transformers that the cut relies on."""

    config = Config()
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class Scaled(Net):
    """Values between the embeddings and the first layer are of the first stage alone."""

    def forward(self, input_ids):
        x = self.embed(input_ids) * 3
        x += 1
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x) * 2) / 3}


class Classifier(Net):
    """Its last stage looks for the last token that is no padding."""

    def forward(self, input_ids):
        logits = super().forward(input_ids)["logits"]
        last = (input_ids != 0).sum(1) - 1
        return {"logits": logits[torch.arange(len(logits)), last]}


class ByName(Net):
    def forward(self, input_ids, scale=None):
        x = self.embed(input=input_ids)
        for layer in self.layers:
            x = layer(input=x)
        return {"logits": self.head(input=self.norm(input=x))}


class InPlace(Net):
    """Changes what a stage has in the place of the embeddings."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x *= 5
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class Caching(Net):
    """A module keeps what it last computed."""

    class Layer(nn.Linear):
        kept = None

        def forward(self, x):
            self.kept = super().forward(x).detach() if self.kept is None else self.kept
            return super().forward(x) + self.kept

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))


class Tuples(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = self.layers[0](x)[0]
        return {"logits": self.head(self.norm(self.layers[1](x)[0]))}


class Skips(Net):
    def forward(self, input_ids):
        start = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x + start))}


class SkipsInPlace(Net):
    def forward(self, input_ids):
        kept = torch.zeros(*input_ids.shape, WIDTH)
        x = self.embed(input_ids)
        kept[:, 1:] = x[:, 1:]
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x) + kept)}


class SkipsLayers(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        return {"logits": self.head(self.norm(self.layers[3](x) + first))}


class Residuals(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.head(self.norm(x))}


class ScalesBetween(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x).mul_(2)
        return {"logits": self.head(self.norm(x))}


class NormTwice(Net):
    def forward(self, input_ids):
        x = self.norm(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class LayersTwice(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class Reversed(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class Pairs(Net):
    """Its layers pass on two values."""

    class Layer(nn.Linear):
        def forward(self, x, other):
            return super().forward(x) + other, x

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids):
        x, other = self.embed(input_ids), torch.zeros(1)
        for layer in self.layers:
            x, other = layer(x, other)
        return {"logits": self.head(self.norm(x))}


class Shared(Net):
    """Its layers share what the first one computes."""

    class Layer(nn.Linear):
        def forward(self, x, shared):
            found = super().forward(x)
            return found + shared.values.setdefault("first", found)

    class Store:
        def __init__(self):
            self.values = {}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids):
        x, shared = self.embed(input_ids), self.Store()
        for layer in self.layers:
            x = layer(x, shared)
        return {"logits": self.head(self.norm(x))}


class SharedList(Shared):
    class Layer(nn.Linear):
        def forward(self, x, shared):
            found = super().forward(x)
            shared.append(found)
            return found + shared[0]

    Store = list


class TiedOutput(Net):
    """Computes with a weight of another stage outside of its module."""

    def forward(self, input_ids):
        x = super().forward(input_ids)["logits"]
        return {"logits": x @ torch.ones(3, WIDTH) @ self.embed.weight.mT}


class ReturnsEmbeddings(Net):
    def forward(self, input_ids):
        return {**super().forward(input_ids), "embeddings": self.embed(input_ids)}


class ReturnsMean(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        mean = x.mean()
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x)), "mean": mean}


class Unpooled(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        self.layers[0](x)
        return {"logits": self.head(self.norm(x))}


def in_stages(model, cut, ids):
    stages = make_stages(copy.deepcopy(model), cut, range(len(cut.stages)), None, None)
    alone = StageLayout(1, len(stages))
    [found] = run_forward(stages, alone, 0, None, [((), {"input_ids": ids})], {}, trains=False).outputs
    return found["logits"]


def cut_of(model, count=2):
    return cut_model(model, PipelineParallelConfig(modules=MODULES), count)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", [Net, Scaled, Classifier, ByName, InPlace, Tuples, Caching])
def test_stages_that_compute_the_same(kind, meta):
    model = kind()
    cut = cut_of(model)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    try_cut(copy.deepcopy(model).to("meta") if meta else model, cut)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    ids = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0], [1, 2, 9, 10]])
    with torch.no_grad():
        found = in_stages(model, cut, ids)
        torch.testing.assert_close(found, model(ids)["logits"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Skips, r"calls 'norm' with a value of 'layers\.1' in another stage"),
        (SkipsInPlace, r"calls 'head' with a value of 'layers\.1' in another stage"),
        (SkipsLayers, r"calls 'norm' with a value of "),
        (Residuals, r"calls 'layers\.2' with something else than what 'layers\.1' returns"),
        (ScalesBetween, r"calls 'layers\.2' with something else than what 'layers\.1' returns"),
        (NormTwice, r"calls 'layers\.0' with a value of 'norm' in another stage"),
        (LayersTwice, r"calls 'layers\.0' again or after 'layers\.1'"),
        (Reversed, r"calls 'layers\.[01]' "),
        (Pairs, r"fails if it begins with 'layers\.2' \(too many values to unpack"),
        (Shared, r"lets 'layers\.2' read what 'layers\.0' has computed and kept"),
        (SharedList, r"lets 'layers\.2' read what 'layers\.0' has computed and kept"),
        (TiedOutput, r"returns values that an earlier stage computes|fails if it begins with 'layers\.2'"),
        (ReturnsEmbeddings, r"calls 'embed' again or after 'layers\.1'"),
        (ReturnsMean, "returns values that an earlier stage computes"),
        (Unpooled, r"calls 'layers\.0' again or after 'layers\.1'"),
    ],
)
def test_stages_that_would_compute_something_else(kind, cause):
    model = kind()
    cut = cut_of(model)
    for meta in (False, True):
        with pytest.raises(PrepareError, match=f"The forward of {kind.__name__} (?:{cause})"):
            try_cut(model.to("meta") if meta else model, cut)


def test_each_number_of_stages_is_tried():
    """Layers that share values may be in one stage."""

    class Late(SkipsLayers):
        def forward(self, input_ids):
            x = self.layers[1](self.layers[0](self.embed(input_ids)))
            later = self.layers[2](x)
            return {"logits": self.head(self.norm(self.layers[3](later) + later))}

    model = Late()
    try_cut(model, cut_of(model, 2))
    with pytest.raises(PrepareError, match="calls 'norm' with a value of"):
        try_cut(model, cut_of(model, 4))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_models_of_transformers(kind):
    from transformers import AutoModelForCausalLM

    config = config_of(kind, 4)
    with torch.device("meta"):
        light = AutoModelForCausalLM.from_config(config)
    for model in (AutoModelForCausalLM.from_config(config), light):
        try_cut(model, cut_model(model, PipelineParallelConfig(), 2))
