"""What fits, what is advised, and what would fit."""

from dataclasses import replace

import pytest

from accel_bigmodel import EstimateError
from accel_bigmodel.planning.advice import make_plan, settings_for, suggestions
from accel_bigmodel.planning.devices import DEVICES, device_memory
from accel_bigmodel.planning.footprints.base import DeviceCluster, Workload
from accel_bigmodel.planning.shape import ModelShape, Phase, Timeline, UnitSizes

BLOCK = UnitSizes(10**8, 10**8, 10**4, largest=10**7)
SHAPE = ModelShape(
    "model", (BLOCK,) * 10, UnitSizes(10**8, 10**8, 10**4, largest=10**8), tensors=100, hidden_size=1024
)
WORK = Workload(batch_size=2, precision="bf16")


def timelines(numbers, again):
    kept = 1e8 if again else 2e9
    return Timeline((Phase(None, False, 0, kept, 0, 0), Phase(None, True, 0, kept, 0, SHAPE.trainable)))


def plan(memory, devices=4, machines=1, work=WORK, host=None):
    return make_plan(SHAPE, DeviceCluster(devices, machines, memory, host_memory=host), work, timelines)


def by_name(found):
    return {row.setting.name: row for row in found.rows}


def test_with_room_nothing_is_offloaded_or_recomputed():
    best = plan(1e12).advised
    assert not (best.setting.offload)
    assert not (best.setting.offload_optimizer)
    assert not (best.setting.checkpointing)
    least = min(row.traffic for row in plan(1e12).rows if row.setting.strategy != "tp")
    assert not best.kind.needs_package
    assert least < best.traffic <= 2 * least


def test_another_package_is_advised_where_it_sends_less_than_half():
    work = Workload(batch_size=2, precision="bf16", micro_batches=8)
    found = plan(1e12, work=work)
    gather, reduce = 2 * SHAPE.parameters * 3 / 4, 4 * SHAPE.trainable * 3 / 4
    assert by_name(found)["ddp"].traffic == 2 * reduce
    assert by_name(found)["fsdp2"].traffic == 16 * gather + reduce
    assert by_name(found)["deepspeed zero 1"].traffic == gather + reduce / 2
    assert found.advised.setting.name == "ddp"
    short = plan(17e9, work=work)  # too little for the replicas of ddp
    assert not by_name(short)["ddp"].fits
    assert short.advised.setting.name.startswith("deepspeed zero")


def test_tensor_parallelism_sends_activations_of_every_token():
    wide = replace(SHAPE, tensor_parallel=(32, 8))
    cluster = DeviceCluster(4, 1, 1e12)
    for tokens, micro_batches in ((1, 1), (2048, 1), (2048, 4)):
        work = Workload(batch_size=2, precision="bf16", seq_length=tokens, micro_batches=micro_batches)
        found = by_name(make_plan(wide, cluster, work, timelines))["tp"]
        sums = 4 * len(wide.units) * micro_batches  # each sends its tensor twice to the others
        assert found.traffic == pytest.approx(sums * 2 * (2 * 2 * tokens * 1024) * 3 / 4)


def test_less_memory_leads_to_recomputing_then_to_offload():
    wanted = [plan(memory).advised.setting for memory in (40e9, 7e9, 3e9)]
    assert [setting.checkpointing for setting in wanted[:2]] == [False, True]
    assert wanted[2].offload
    assert plan(0.2e9).advised is None


def test_the_largest_batch_fits_and_one_more_does_not():
    found = plan(40e9)
    row = by_name(found)["fsdp2"]
    largest = row.largest_batch
    assert by_name(plan(40e9, work=Workload(largest, precision="bf16")))["fsdp2"].fits
    assert not by_name(plan(40e9, work=Workload(largest + 1, precision="bf16")))["fsdp2"].fits


def test_host_memory_is_compared_where_it_is_known():
    assert by_name(plan(10e9))["fsdp2 + offload"].fits
    short = plan(10e9, host=10e9)
    assert not by_name(short)["fsdp2 + offload"].fits
    assert by_name(short)["fsdp2 + offload"].host == pytest.approx(16 * SHAPE.parameters, rel=0.01)


def test_which_strategies_can_run():
    names = {setting.name for setting in settings_for(SHAPE, DeviceCluster(1, 1, 1e9), WORK, False)}
    assert "single" in names
    assert not any("ddp" in name or "fsdp2" in name for name in names)
    names = {setting.name for setting in settings_for(SHAPE, DeviceCluster(16, 2, 1e9), WORK, False)}
    assert {"ddp", "fsdp2", "hsdp", "deepspeed zero 3 + full offload"} <= names
    assert "tp" not in names
    wide = ModelShape("m", SHAPE.units, SHAPE.outside, tensor_parallel=(32, 8))
    assert "tp" in {setting.name for setting in settings_for(wide, DeviceCluster(8, 1, 1e9), WORK, False)}
    assert "tp" not in {
        setting.name for setting in settings_for(wide, DeviceCluster(12, 1, 1e9), WORK, False)
    }
    sgd = settings_for(SHAPE, DeviceCluster(2, 1, 1e9), Workload(optimizer="sgd"), False)
    assert not any(setting.offload_optimizer for setting in sgd)
    muon = settings_for(SHAPE, DeviceCluster(2, 1, 1e9), Workload(optimizer="muon"), False)
    assert {"ddp", "fsdp2"} <= {setting.strategy for setting in muon} <= {"ddp", "fsdp2", "hsdp"}


def test_suggestions_are_changes_after_which_something_fits():
    found = plan(6e9, host=1e9, work=Workload(batch_size=64, precision="bf16"))
    assert found.advised is None
    changes = {each.change.split()[0]: each for each in suggestions(found, timelines)}
    assert changes["--batch_size"].row.found.peak.total <= 6e9
    batch = int(changes["--batch_size"].change.split()[1].rstrip(","))
    assert plan(6e9, host=1e9, work=Workload(batch, precision="bf16")).advised is not None
    assert plan(6e9, host=1e9, work=Workload(batch + 1, precision="bf16")).advised is None


def test_suggestions_name_host_memory_and_devices():
    changes = {each.change for each in suggestions(plan(3e9, host=1e9), timelines)}
    assert "more host memory" in changes
    devices = next(each for each in changes if each.startswith("--devices")).split()
    counts = [int(word) for word in devices if word.isdigit()]
    machines = counts[1] if len(counts) > 1 else 1
    assert plan(3e9, devices=counts[0], machines=machines, host=1e9).advised is not None
    assert plan(3e9, devices=counts[0] // 2, machines=max(1, machines // 2), host=1e9).advised is None


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(EstimateError, match="9 devices cannot be divided among 2 machines"):
        plan(1e9, devices=9, machines=2)


def test_names_of_devices():
    assert device_memory("H100") == device_memory("h100_80GB") == 80 * 10**9
    with pytest.raises(EstimateError, match="a100-40gb, a100-80gb"):
        device_memory("a100")
    with pytest.raises(EstimateError, match=r"did you mean .*h100-80gb"):
        device_memory("h100-81gb")
    assert all(name.endswith(f"-{size}gb") for name, size in DEVICES.items())


def test_fp8_takes_what_bf16_takes_and_has_fewer_strategies():
    wide = replace(SHAPE, tensor_parallel=(32, 8))

    def found(precision):
        work = Workload(batch_size=2, precision=precision)
        return by_name(make_plan(wide, DeviceCluster(4, 1, 1e12), work, timelines))

    low, lowest = found("bf16"), found("fp8")
    assert set(low) - set(lowest) == {name for name in low if name.startswith(("deepspeed", "tp"))} > set()
    assert lowest == {name: row for name, row in low.items() if name in lowest}
