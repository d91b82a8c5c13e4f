import pytest
from torch import nn

from accel_train.errors import PrepareError
from accel_train.plugins import PipelineParallelConfig
from accel_train.strategies.pipeline.cut import cut_model


def chain(*sizes):
    return nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))


class Named(nn.Module):
    """A chain that is no Sequential."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OfTransformers(Named):
    """What tells models of transformers from others."""

    config = None

    def get_input_embeddings(self):
        return self.first


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ((1, 1, 1, 1), 2, [2, 2]),
        ((1, 1, 1, 3), 2, [3, 1]),
        ((9, 1, 1, 1), 3, [1, 1, 2]),
        ((1, 1, 1, 1, 1), 2, [2, 3]),
        ((5, 4, 3, 2, 1), 5, [1, 1, 1, 1, 1]),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(sizes, count, expected):
    cut = cut_model(chain(*sizes), PipelineParallelConfig(), count)
    found = [len(stage) for stage in cut.stages]
    heaviest = max(sum(sizes[int(name)] for name in stage) for stage in cut.stages)
    assert sorted(found) == sorted(expected)
    assert heaviest == max(sum(sizes[start:stop]) for start, stop in _runs(expected))
    assert cut.names == tuple(map(str, range(len(sizes))))
    assert cut.chain


def _runs(lengths):
    start = 0
    for length in lengths:
        yield start, start + length
        start += length


def test_modules_and_cuts_are_named():
    config = PipelineParallelConfig(modules=["first", "blocks", "head"], cuts=["blocks.2"])
    cut = cut_model(Named(), config, 2)
    assert cut.stages == (("first", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head"))
    assert cut.layers == {f"blocks.{number}" for number in range(4)}


def test_what_is_before_and_after_the_layers_goes_with_them():
    model = Named()
    model.head = nn.Linear(4, 1000)
    cut = cut_model(model, PipelineParallelConfig(modules=["first", "blocks", "head"]), 3)
    assert cut.stages[-1] == ("blocks.3", "head")
    assert cut.stages[0][0] == "first"


def twice(module):
    return nn.Sequential(module, nn.Linear(1, 1), module, nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("module", "cut_at"),
    [(nn.Tanh(), "2"), (nn.Linear(1, 1), "3")],
    ids=["without parameters", "in one stage"],
)
def test_a_module_may_be_there_twice(module, cut_at):
    cut = cut_model(twice(module), PipelineParallelConfig(cuts=[cut_at]), 2)
    assert cut.names == ("0", "1", "2", "3")
    assert cut.stages[1][0] == cut_at


def tied():
    model = Named()
    model.head.weight = model.first.weight
    return model


@pytest.mark.parametrize(
    ("model", "options", "count", "message"),
    [
        (
            Named(),
            {},
            2,
            "Named is no nn.Sequential, so how to cut it into stages of a pipeline is not known",
        ),
        (
            Named(),
            {"modules": ["first", "block", "head"]},
            2,
            r"'block', which is no module.*Did you mean 'blocks'",
        ),
        (
            Named(),
            {"modules": ["first", "blocks"]},
            2,
            r"'head.weight' \(of 2 parameters\) of Named is in none",
        ),
        (Named(), {"modules": ["first", "blocks", "blocks.1", "head"]}, 2, "'blocks.1' stands twice"),
        (chain(1, 1), {}, 3, "Sequential has 2 layers, which cannot make 3 stages"),
        (
            chain(1, 1, 1),
            {"cuts": ["1", "2"]},
            2,
            "has 2 names, and 2 stages begin at 1 modules besides the first",
        ),
        (chain(1, 1, 1), {"cuts": ["0"]}, 2, "names '0', before which a stage would be empty"),
        (chain(1, 1, 1), {"cuts": ["2", "1"]}, 3, "names '1', before which a stage would be empty"),
        (
            chain(1, 1, 1),
            {"cuts": ["7"]},
            2,
            "names '7', which is none of Sequential's modules. They are 0, 1, 2",
        ),
        (tied(), {"modules": ["first", "blocks", "head"]}, 2, "are one parameter: they are tied weights"),
        (
            twice(nn.Linear(1, 1)),
            {"cuts": ["2"]},
            2,
            r"'0.weight' and '2.weight' of Sequential are one parameter: they are in one module, which is there twice "
            r"\('0', '2'\)",
        ),
        (
            OfTransformers(),
            {"modules": ["first", "blocks", "head"], "cuts": ["head"]},
            2,
            "Stage 1 of the pipeline would be head, without any of the 4 layers",
        ),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused(model, options, count, message):
    before = dict(model.named_modules())
    with pytest.raises(PrepareError, match=message):
        cut_model(model, PipelineParallelConfig(**options), count)
    assert dict(model.named_modules()) == before
