"""Which file names belong to what."""

from accel_ckpt.format.state_files import model_stem, part_file, rank_stem, tensor_files


def test_names_are_recognised_and_those_of_others_are_not():
    assert [model_stem(i, safe) for i in (0, 2) for safe in (True, False)] == [
        "model", "pytorch_model", "model_2", "pytorch_model_2",
    ]  # fmt: skip
    assert rank_stem(7) == "rank-00007"
    assert part_file("state", 3) == "state-shard-00003.safetensors"
    assert part_file("model_1", 3, 2) == "model_1-shard-00003-2.safetensors"
    for stem in ("model", "model_1", "state"):
        for number in (0, 1, 12):
            name = part_file(stem, 3, number)
            assert [s for s in ("model", "model_1", "state") if tensor_files([name], s)] == [stem]
    mine = ["state.safetensors", "state-00002.safetensors"]
    assert tensor_files([*mine, "state_0.safetensors", "state.json"], "state") == mine
    assert tensor_files(["model-00001-of-00002.safetensors"], "model") == []
