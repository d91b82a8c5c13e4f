"""Which rank writes what of a training state, against the state that went in: drafts of ranks that are made by hand."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.parts import Part
from accel_ckpt.saving.draft import StateDraft, StatePlan, fingerprints

LARGE = (1 << 14) + 1  # float32 elements: more bytes than are worth dividing among ranks


def draft(rank=0, models=(), shared=None, per_rank=None, **more):
    options = {"leads": rank == 0, "replicated": (), "safe_serialization": True, "max_shard_size": 10**9}
    return StateDraft.make(models, shared or {}, per_rank or {}, rank=rank, **(options | more))


def write(folder, *drafts):
    """Write what ranks plan; per rank, the names of its files. No file has two writers."""
    offers = [made.offer() for made in drafts]
    written = []
    for position, made in enumerate(drafts):
        plan = made.plan(offers, position)
        names = [*plan.texts, *(file.name for file in plan.files)]
        assert set(plan.write(folder).files) == set(names)
        written.append(names)
    everything = [name for names in written for name in names]
    assert sorted(everything) == sorted(path.name for path in folder.iterdir())
    return written


def tensors_in(folder, pattern):
    found = {}
    for path in sorted(folder.glob(pattern)):
        content = load_file(path)
        assert not found.keys() & content.keys(), "a tensor was written twice"
        found |= content
    return found


def test_one_rank_writes_all(tmp_path):
    weight, moment, state = torch.randn(3, 2), torch.randn(2), torch.arange(4, dtype=torch.uint8)
    made = draft(
        models=[{"weight": weight, "version": 3}, {"bias": moment}],
        shared={"optimizer": {"state": [{"exp_avg": moment}], "lr": 0.1}},
        per_rank={"random": {"torch": state}},
    )
    (names,) = write(tmp_path, made)
    assert sorted(names) == [
        "model.safetensors",
        "model_1.safetensors",
        "rank-00000.json",
        "rank-00000.safetensors",
        "state.json",
        "state.safetensors",
    ]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], weight)
    assert torch.equal(load_file(tmp_path / "model_1.safetensors")["bias"], moment)
    state_file = load_file(tmp_path / "state.safetensors")
    assert list(state_file) == ["optimizer.state.0.exp_avg"]
    assert torch.equal(state_file["optimizer.state.0.exp_avg"], moment)
    assert torch.equal(load_file(tmp_path / "rank-00000.safetensors")["random.torch"], state)
    texts = json.loads((tmp_path / "state.json").read_text())
    assert sorted(texts) == ["model_0.extra", "optimizer"]
    assert list(json.loads((tmp_path / "rank-00000.json").read_text())) == ["random"]


def test_an_offer_counts_what_a_rank_writes_alone():
    own, small, large = torch.zeros(5), torch.zeros(7), torch.zeros(LARGE)
    trees = {"shared": {"o": {"small": small, "large": large}}, "per_rank": {"r": own}, "replicated": ("o",)}
    leading = draft(0, [{"w": torch.zeros(11)}], **trees).offer()
    other = draft(1, [{}], **trees).offer()
    assert leading["load"] == 4 * (7 + 11)
    assert other["load"] == 4 * 7
    assert list(leading["alike"]) == list(other["alike"]) == ["o.large"]
    assert leading["alike"] == other["alike"]
    assert leading["alike"]["o.large"][0] == 4 * LARGE


def test_ranks_divide_what_they_hold_alike(tmp_path):
    moments = {f"m{index}": torch.randn(LARGE) for index in range(4)}
    trees = {"shared": {"o": moments}, "replicated": ("o",)}
    first, second = write(tmp_path, draft(0, [], **trees), draft(1, [], **trees))
    assert "state.safetensors" in first
    assert "state-00001.safetensors" in second
    assert {len(load_file(path)) for path in tmp_path.glob("state*.safetensors")} == {2}
    found = tensors_in(tmp_path, "state*.safetensors")
    assert {name: torch.equal(found[f"o.{name}"], moments[name]) for name in moments} == dict.fromkeys(
        moments, True
    )


def test_what_differs_is_the_leading_ranks(tmp_path):
    mine, other = torch.zeros(LARGE), torch.zeros(LARGE)
    other += 1
    made = [draft(rank, [], {"o": {"m": m}}, replicated=("o",)) for rank, m in enumerate((mine, other))]
    _, second = write(tmp_path, *made)
    assert second == ["rank-00001.json"]
    assert torch.equal(load_file(tmp_path / "state.safetensors")["o.m"], mine)


def test_trees_that_are_not_replicated_are_not_divided(tmp_path):
    made = [draft(rank, [], {"o": {"m": torch.zeros(LARGE)}}, replicated=("other",)) for rank in (0, 1)]
    assert made[0].offer()["alike"] == {}
    assert write(tmp_path, *made)[1] == ["rank-00001.json"]


def test_parts_of_two_ranks_make_up_a_tensor(tmp_path):
    weight, moment = torch.arange(24.0).view(6, 4), torch.arange(12.0).view(3, 4)
    made = [
        draft(0, [{"w": Part(weight[:2], (0, 0), (6, 4)), "b": torch.ones(3)}], {"o": Part.nothing((3, 4))}),
        draft(1, [{"w": Part(weight[2:], (2, 0), (6, 4))}], {"o": Part.whole(moment)}),
    ]
    first, second = write(tmp_path, *made)
    assert "model-shard-00000.safetensors" in first
    assert "model.safetensors" in first
    assert sorted(second) == [
        "model-shard-00001.safetensors",
        "rank-00001.json",
        "state-shard-00001.safetensors",
    ]
    found = [load_file(tmp_path / f"model-shard-0000{rank}.safetensors")["w"] for rank in (0, 1)]
    assert torch.equal(torch.cat(found), weight)
    assert torch.equal(load_file(tmp_path / "state-shard-00001.safetensors")["o"], moment)
    plan = made[0].plan([one.offer() for one in made], 0)
    assert plan.models == (("model.safetensors",),)
    assert plan.layout.others["model"] == [f"model-shard-0000{rank}.safetensors" for rank in (0, 1)]


def test_a_file_has_one_place_for_a_name(tmp_path):
    weight = torch.arange(12.0).view(4, 3)
    rows = [Part(weight[low : low + 1], (low, 0), (4, 3)) for low in range(4)]
    write(tmp_path, draft(models=[{"w": rows}]))
    assert sorted(path.name for path in tmp_path.glob("model*")) == [
        "model-shard-00000-1.safetensors",
        "model-shard-00000-2.safetensors",
        "model-shard-00000-3.safetensors",
        "model-shard-00000.safetensors",
    ]
    seen = sorted(float(load_file(path)["w"][0, 0]) for path in tmp_path.glob("model*"))
    assert seen == [0.0, 3.0, 6.0, 9.0]


def test_tied_parts_are_written_once_under_both_names(tmp_path):
    weight = torch.arange(6.0)
    made = [
        draft(rank, [{name: Part(weight[3 * rank :][:3], (3 * rank,), (6,)) for name in ("a", "b")}])
        for rank in (0, 1)
    ]
    write(tmp_path, *made)
    for rank in (0, 1):
        with safe_open(tmp_path / f"model-shard-0000{rank}.safetensors", "pt") as file:
            assert list(file.keys()) == ["a"]
            assert file.metadata()["b"] == "a"


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            {"models": [{}]},
            {"models": [{}, {"w": Part.whole(torch.ones(2))}]},
            r"rank 1 saves parts of w of a model \(model_1\) that the leading rank does not save",
        ),
        (
            {"models": [{"w": torch.ones(2)}]},
            {"models": [{"w": Part.whole(torch.ones(2))}]},
            "w: whole tensors on the leading rank, and parts of tensors on rank 1",
        ),
        (
            {"shared": {"o": {}}},
            {"shared": {"o": {"m": Part.whole(torch.ones(2))}}},
            r"rank 1 saves parts of o\.m in shared trees.*Part\.nothing\(shape\)",
        ),
    ],
)
def test_what_the_leading_rank_does_not_describe(first, second, told, tmp_path):
    made = [draft(0, **first), draft(1, **second)]
    offers = [one.offer() for one in made]
    plan = made[0].plan(offers, 0)
    for refused in (plan.check, lambda: plan.write(tmp_path)):
        with pytest.raises(UnsupportedValueError, match=told):
            refused()
    made[1].plan(offers, 1).check()  # the leading rank says it for all
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_no_rank_holds_is_refused_on_all():
    half = Part(torch.ones(2), (0,), (4,))
    made = [draft(0, [{"w": half}]), draft(1, [{}])]
    offers = [one.offer() for one in made]
    for position, one in enumerate(made):
        with pytest.raises(UnsupportedValueError, match="w"):
            one.plan(offers, position)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"shared": {3: {}}}, "have names; 3 is a int"),
        ({"shared": {"o": {"f": [1, lambda: 0]}}}, r"o.*f.*1"),
        ({"per_rank": {"r": {"p": Part.nothing((2,))}}}, r"r\.p: trees of each rank hold whole tensors"),
        ({"shared": {"o": {"t": torch.ones(2, 2).to_sparse()}}}, "has the layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_saved_is_named(content, told):
    with pytest.raises(UnsupportedValueError, match=told):
        draft(**content)


def test_a_tree_that_is_too_deep():
    tree = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(UnsupportedValueError, match="'deep' of the training state is nested too deeply"):
        draft(shared={"deep": tree})


def test_tensors_whose_paths_read_alike_keep_their_values(tmp_path):
    tree = {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}}
    write(tmp_path, draft(shared={"o": tree, "__metadata__": torch.tensor([3.0])}))
    found = load_file(tmp_path / "state.safetensors")
    assert sorted(float(value) for value in found.values()) == [1.0, 2.0, 3.0]
    assert "__metadata__" not in found


def test_a_plan_with_a_problem_writes_nothing(tmp_path):
    with pytest.raises(UnsupportedValueError, match="the reason"):
        StatePlan({"a.json": b"{}"}, (), problem="the reason").write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fingerprints_tell_dtypes_shapes_and_values_apart():
    base = torch.zeros(600)
    tensors = [base, base.clone(), base.view(2, 300), base.to(torch.int32), base + 1, torch.zeros(0)]
    marks = fingerprints(tensors)
    assert marks[0] == marks[1]
    assert len(set(marks)) == 5
    small = torch.zeros(255)
    for index in range(255):  # all elements of small tensors are compared
        other = small.clone()
        other[index] = 1
        assert len(set(fingerprints([small, other]))) == 2
    assert fingerprints([]) == []
