"""Parts of tensors: saved in any division among ranks, loaded in any other; by real ranks."""

import pathlib
import random

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
SEEDS = range(12)
SHAPES = {"matrix": (7, 5), "vector": (11,), "scalar": (), "cube": (3, 4, 5), "empty": (0, 3), "row": (1, 6)}


def values(name, seed):
    """The whole tensor of this name."""
    generator = torch.Generator().manual_seed(seed * 100 + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def division(shape, ranks, chance):
    """For each rank, its boxes of a random division; some of them are held by several ranks."""
    from accel_ckpt.geometry import Box

    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(chance.randrange(6)):
        box = boxes.pop(chance.randrange(len(boxes)))
        cuttable = [d for d, n in enumerate(box.sizes) if n > 1]
        if not cuttable:
            boxes.append(box)
            continue
        d = chance.choice(cuttable)
        at = chance.randrange(1, box.sizes[d])
        for start, size in ((0, at), (at, box.sizes[d] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[d] += start
            sizes[d] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    held = [[] for _ in range(ranks)]
    for box in boxes:
        for rank in chance.sample(range(ranks), chance.randrange(1, ranks + 1)):
            held[rank].append(box)
    return held


def parts_by_name(seed, rank, ranks, purpose, filled):
    """This rank's parts, as one Part, several, an empty one, or no entry where it holds nothing."""
    from accel_ckpt import Part

    chance = random.Random(f"{seed} {ranks} {purpose}")
    found = {}
    for name, shape in SHAPES.items():
        whole = values(name, seed)
        boxes = division(shape, ranks, chance)[rank]
        parts = [
            Part(whole[b.slices].clone() if filled else torch.full(b.sizes, torch.nan), b.offsets, shape)
            for b in boxes
        ]
        if len(parts) == 1:
            found[name] = parts[0]
        elif parts:
            found[name] = parts
        elif seed % 2 or purpose != "models":
            found[name] = Part.nothing(shape)
    return found


def save(folder):
    from accel_ckpt import default_coordinator, save_training_state

    ranks = default_coordinator()
    for seed in SEEDS:
        save_training_state(
            f"{folder}/{seed}",
            models=[parts_by_name(seed, ranks.rank, ranks.world_size, "models", True)],
            shared={
                "tree": {
                    "of": [parts_by_name(seed, ranks.rank, ranks.world_size, "shared", True)],
                    "number": 3,
                }
            },
            per_rank={},
        )


def load(folder):
    """Load into another random division, as DTensors, and whole; by names in the files, by `weights`, and lazily."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accel_ckpt import default_coordinator, open_training_state
    from accel_ckpt.format.saved_tensors import fill_all
    from accel_ckpt.parts import parts_of

    ranks = default_coordinator()
    mesh = init_device_mesh("cpu", (ranks.world_size,)) if ranks.world_size > 1 else None
    for seed in SEEDS:
        checkpoint = open_training_state(f"{folder}/{seed}")
        weights = checkpoint.weights(0)
        assert {name: tuple(shape) for name, shape in weights.shapes.items()} == SHAPES
        assert set(weights.dtypes.values()) == {torch.float32}

        def targets(purpose, seed=seed):
            return parts_by_name(seed, ranks.rank, ranks.world_size, purpose, False)

        parts = targets("load")
        weights.check(parts)
        weights.fill(parts)
        of_tree = targets("load tree")
        checkpoint.load_shared({f"tree.of.0.{name}": leaf for name, leaf in of_tree.items()})
        lazily = targets("load lazily")
        tree = checkpoint.lazy_shared(["tree"])["tree"]
        assert tree["number"] == 3
        fill_all([(tree["of"][0][name], leaf) for name, leaf in lazily.items()])
        plain = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        checkpoint.load_model(0, plain)
        sharded = {
            name: distribute_tensor(torch.full(shape, torch.nan), mesh, [Shard(seed % len(shape))])
            for name, shape in SHAPES.items()
            if shape and mesh is not None
        }
        checkpoint.load_model(0, sharded)
        for found in (parts, of_tree, lazily, plain, sharded):
            for name, leaf in found.items():
                for part in parts_of(leaf):
                    assert torch.equal(part.tensor, values(name, seed)[part.box.slices]), (seed, name)
        whole = checkpoint.shared["tree"]["of"][0]
        assert all(torch.equal(checkpoint.models[0][n], values(n, seed)) for n in SHAPES)
        assert all(torch.equal(whole[name], values(name, seed)) for name in SHAPES)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.full)])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    worlds.run(save, request.param, str(folder))
    return folder


@pytest.mark.wide(but=["1-2", "2-4"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2, 4])
def test_any_division_loads_into_any_other(saved, ranks):
    worlds.run(load, ranks, str(saved))


def test_every_element_is_written_once(saved):
    from safetensors import safe_open

    for seed in SEEDS:
        written = dict.fromkeys(SHAPES, 0)
        for path in (pathlib.Path(saved) / str(seed)).glob("model*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    written[name] += file.get_tensor(name).numel()
        assert written == {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


def test_torch_s_hugging_face_reader_reads_it(saved):
    import torch.distributed.checkpoint as dcp

    for seed in SEEDS:
        target = {name: torch.zeros(shape) for name, shape in SHAPES.items() if torch.Size(shape).numel()}
        reader = dcp.HuggingFaceStorageReader(str(saved / str(seed)))
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert all(torch.equal(target[name], values(name, seed)) for name in target)


def test_stages_of_a_pipeline_hold_other_names(tmp_path):
    def work(folder):
        from accel_ckpt import Part, default_coordinator, open_training_state, save_training_state

        rank = default_coordinator().rank
        torch.manual_seed(rank)
        stage = nn.Linear(3, 3)
        weights = {f"stages.{rank}.{name}": Part.whole(p.detach()) for name, p in stage.named_parameters()}
        other = {} if rank == 0 else {"only.elsewhere": Part.whole(torch.ones(2))}
        save_training_state(folder, models=[weights, other], shared={}, per_rank={})
        checkpoint = open_training_state(folder)
        assert not checkpoint.manifest.files.keys() & {"model.safetensors", "model_1.safetensors"}
        assert torch.equal(checkpoint.models[1]["only.elsewhere"], torch.ones(2))
        found = checkpoint.models[0]
        for r in (0, 1):
            torch.manual_seed(r)
            expected = nn.Linear(3, 3).state_dict()
            assert all(torch.equal(found[f"stages.{r}.{name}"], value) for name, value in expected.items())

    worlds.run(work, 2, str(tmp_path / "c"))


@pytest.mark.parametrize("background", [False, True])
def test_what_ranks_do_not_hold_together_is_refused_on_all(tmp_path, background):
    def work(folder, background):
        from accel_ckpt import (
            BackgroundSaver,
            CheckpointSaveError,
            Part,
            UnsupportedValueError,
            default_coordinator,
            save_training_state,
        )

        rank = default_coordinator().rank
        upper, lower = Part(torch.ones(2, 3), (0, 0), (4, 3)), Part(torch.ones(2, 3), (2, 0), (4, 3))
        smaller = Part(torch.ones(1, 3), (3, 0), (4, 3))
        whole = torch.ones(4, 3)
        # Message; what rank 0 saves, and rank 1, as models and as shared trees.
        models = [
            (r"no rank holds \[2:3, 0:3\] of the tensor 'w' of shape \[4, 3\]", [upper], [smaller]),
            (r"'w' as tensors of another shape", [upper], [Part.nothing((4, 4))]),
            (r"w: whole tensors on the leading rank, and parts .* on rank 1", [whole], [Part.whole(whole)]),
            (r"parts of w of a model \(model_1\)", [upper], [lower, [upper, lower]]),
        ]
        trees = [
            (r"parts of t.x in shared trees", {}, {"x": Part.whole(whole)}),
            (r"no rank holds \[2:4, 0:3\]", [upper, 1], [Part.nothing((4, 3)), 1]),
        ]
        cases = [(message, [{"w": leaf} for leaf in given[rank]], {}) for message, *given in models]
        cases += [(message, [], {"t": given[rank]}) for message, *given in trees]
        for message, given, shared in cases:
            content = {"models": given, "shared": shared, "per_rank": {}}
            save = BackgroundSaver().save if background else save_training_state
            with pytest.raises((UnsupportedValueError, CheckpointSaveError), match=message):
                save(folder, **content)

    worlds.run(work, 2, str(tmp_path / "c"), background)
    assert not list(tmp_path.iterdir())


def test_what_one_rank_may_not_save_as_its_own(tmp_path):
    from accel_ckpt import Part, UnsupportedValueError, save_training_state

    part = Part.whole(torch.ones(2))
    with pytest.raises(UnsupportedValueError, match=r"tree\.x: trees of each rank hold whole tensors"):
        save_training_state(tmp_path / "c", models=[], shared={}, per_rank={"tree": {"x": part}})
    mixed = [Part.whole(torch.ones(2)), Part.whole(torch.ones(3))]
    with pytest.raises(
        UnsupportedValueError, match=r"\['tree'\]\['x'\] cannot be saved: a list of parts must hold"
    ):
        save_training_state(tmp_path / "c", models=[], shared={"tree": {"x": mixed}}, per_rank={})


# Real DTensors whose parts have gaps, or are not what torch's own offsets say


def fsdp_over_tp(rows):
    """Weights divided by TP, and what that leaves by FSDP; and the whole, the same on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    fully_shard(model, mesh=mesh["dp"])
    return model, expected


@pytest.mark.parametrize("rows", [8, 5, 3])
def test_t38_fsdp_over_tp(tmp_path, rows):
    def work(folder, rows):
        from accel_ckpt import open_training_state, save_training_state

        model, expected = fsdp_over_tp(rows)
        save_training_state(folder, models=[model.state_dict()], shared={}, per_rank={})
        checkpoint = open_training_state(folder)
        found = checkpoint.models[0]
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        held = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.to_local().detach().zero_()
        checkpoint.load_model(0, model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local(), held[name]), name

    worlds.run(work, 4, str(tmp_path / "c"), rows)


def test_t38_a_strided_shard_with_gaps(tmp_path):
    def work(folder):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor.placement_types import _StridedShard

        from accel_ckpt import default_coordinator, open_training_state, save_training_state

        rank = default_coordinator().rank
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(24.0).view(8, 3)
        mine = torch.cat(
            [piece.chunk(2)[rank // 2] for piece in whole.chunk(2)]
        )  # rows 0, 1, 4, 5 or 2, 3, 6, 7
        placements = (_StridedShard(0, split_factor=2), Replicate())
        held = DTensor.from_local(
            mine.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=(3, 1)
        )
        save_training_state(folder, models=[{"w": held}], shared={}, per_rank={})
        checkpoint = open_training_state(folder)
        assert torch.equal(checkpoint.models[0]["w"], whole)
        held.to_local().zero_()
        checkpoint.load_model(0, {"w": held})
        assert torch.equal(held.to_local(), mine)

    worlds.run(work, 4, str(tmp_path / "c"))
