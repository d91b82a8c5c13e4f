"""What a rank holds under each strategy, counted by hand."""

from dataclasses import replace

import pytest

from accel_bigmodel.planning.footprints.base import DeviceCluster, Setting, Workload, optimizer_bytes
from accel_bigmodel.planning.footprints.fsdp2 import FSDP2Footprint
from accel_bigmodel.planning.footprints.pipeline import PipelineFootprint, ShardedPipelineFootprint
from accel_bigmodel.planning.footprints.registry import footprint
from accel_bigmodel.planning.shape import ModelShape, Phase, Timeline, UnitSizes

BLOCK = UnitSizes(1000, 1000, 70, largest=600)
OUTSIDE = UnitSizes(400, 400, 50, largest=400)
SHAPE = ModelShape("toy", (BLOCK, BLOCK), OUTSIDE, buffers=16, tensors=5)
TIMELINE = Timeline(
    (
        Phase(None, False, 0, 10, 0, 0),
        Phase(0, False, 0, 100, 0, 0),
        Phase(1, False, 0, 200, 0, 0),
        Phase(None, False, 0, 50000, 40000, 0),
        Phase(None, True, 0, 60000, 55000, 300),
        Phase(1, True, 0, 300, 0, 1000),
        Phase(0, True, 0, 200, 0, 1000),
        Phase(None, True, 0, 50, 0, 100),
    )
)
ON_CPU = Workload(batch_size=2, accelerator=False)


def found(setting, workload=ON_CPU):
    return footprint(SHAPE, setting, workload, lambda numbers, again: TIMELINE)


def test_one_process_peaks_where_the_logits_are():
    peak = found(Setting("single", "single")).peak
    assert peak.weights == 4 * 2400 + 16
    assert peak.optimizer == 8 * 2400 + 4 * 5
    assert (peak.activations, peak.logits, peak.gradients) == (10000, 110000, 0)
    assert peak.when == "backward of embeddings, head and loss"
    assert peak.total == 9616 + 19220 + 120000


def test_one_process_without_activations_peaks_in_the_step():
    said = footprint(SHAPE, Setting("single", "single"), ON_CPU, lambda numbers, again: None)
    assert not said.knows_activations
    assert said.peak.when == "optimizer step"
    assert said.peak.total == 9616 + 19220 + 9600 + 2 * 4 * 600
    on_gpu = footprint(SHAPE, Setting("single", "single"), Workload(), lambda numbers, again: None)
    assert on_gpu.peak.total == 9616 + 19220 + 9600 + 4 * 2400  # of all tensors together


def test_ddp_keeps_its_buckets_between_steps():
    said = found(Setting("ddp", "ddp", 2))
    assert said.kept == 9616 + 19220 + 9600
    assert said.peak.total == said.kept + 120000


def test_parts_of_fsdp2_between_steps_and_in_host_memory():
    assert found(Setting("fsdp2", "fsdp2", 4)).kept == (9600 + 19220) / 4 + 16
    offloaded = found(Setting("offload", "fsdp2", 4, offload=True))
    assert offloaded.kept == 16
    assert offloaded.host == (9600 + 19220 + 9600) / 4


def test_what_fsdp2_gathers():
    timeline = Timeline((Phase(1, False, 0, 1e6, 0, 0), Phase(None, True, 0, 0, 0, 2400)))
    base = Setting("fsdp2", "fsdp2", 2)

    def gathered(setting, workload):
        return footprint(SHAPE, setting, workload, lambda numbers, again: timeline).peak.gathered

    low = Workload(precision="bf16", accelerator=False)
    assert gathered(base, ON_CPU) == 4 * (400 + 1000 + 1000)  # outside, the unit, the copy of the next
    assert gathered(base, low) == 2 * (400 + 1000 + 1000)
    assert gathered(Setting("whole", "fsdp2", 2, reshard=False), ON_CPU) == 4 * (2400 + 1000)
    assert gathered(base, Workload()) == 4 * (400 + 1000 + 2 * 1000)  # accelerators hold a copy longer


@pytest.mark.parametrize(
    ("stage", "precision", "kept"),
    [
        (1, "no", 4 + 12 / 4),
        (2, "no", 4 + 12 / 4),
        (3, "no", 20 / 4),
        (1, "bf16", 2 + 12 / 4),
        (2, "bf16", 2 + 12 / 4),
        (3, "bf16", 16 / 4),
    ],
)
def test_what_zero_keeps_between_steps(stage, precision, kept):
    said = found(Setting("zero", "deepspeed", 4, stage=stage), Workload(precision=precision))
    assert said.kept == kept * 2400 + 16 + 4 * 5 / 4


def test_offload_of_zero_leaves_the_weights():
    said = found(Setting("zero", "deepspeed", 4, stage=2, offload_optimizer=True), Workload(precision="bf16"))
    assert said.kept == 2 * 2400 + 16
    assert said.host == (16 * 2400 + 20) / 4
    full = Setting("zero", "deepspeed", 4, stage=3, offload_optimizer=True, offload=True)
    assert found(full, Workload(precision="bf16")).kept == 16
    assert found(full, Workload(precision="bf16")).host == (18 * 2400 + 20) / 4


def test_states_of_optimizers():
    sizes = {
        name: optimizer_bytes(SHAPE, Workload(optimizer=name))
        for name in ("adamw", "muon", "sgd", "adafactor", "8bit")
    }
    outside = SHAPE.outside.trainable
    assert outside == 400
    assert sizes == {
        "adamw": 19220,
        "muon": 4 * 2000 + 8 * outside,
        "sgd": 0,
        "adafactor": 4 * 190,
        "8bit": 2 * 2400 * (1 + 4 / 256),
    }
    assert optimizer_bytes(SHAPE, Workload(optimizer="adafactor"), flat=True) == 4 * 2400


def test_accumulation_keeps_gradients_in_the_forward():
    plain = found(Setting("single", "single")).peak
    waiting = found(Setting("single", "single"), Workload(2, micro_batches=2, accelerator=False)).peak
    assert waiting.gradients == 9600
    assert waiting.total > plain.total
    # FSDP2 does not reduce within a window: gradients stay whole.
    assert found(Setting("fsdp2", "fsdp2", 4), Workload(2, micro_batches=2)).peak.gradients == 9600
    # In 16 bits too they stay in the dtype of the reduction, float32.
    low = found(Setting("fsdp2", "fsdp2", 4), Workload(2, precision="bf16", micro_batches=2)).peak
    assert low.gradients == 9600


MIXTURE = replace(
    SHAPE,
    units=(replace(BLOCK, experts=800, trained_experts=800),) * 2,
    experts=4,
    routes=2,
    hidden_size=10,
)


def with_experts(ranks, workload):
    setting = Setting("experts", "fsdp2", 4, experts=ranks)
    return footprint(MIXTURE, setting, workload, lambda numbers, again: TIMELINE)


def test_experts_of_other_ranks_are_not_gathered():
    # A unit has 200 parameters and 800 of experts, of which a rank gathers a quarter, also of the next unit. The input
    # of a reduction has as many.
    for ranks, held in ((1, 1000), (4, 400)):
        setting = Setting("experts", "fsdp2", 4, experts=ranks)
        footprint_of = FSDP2Footprint(MIXTURE, setting, Workload(2), TIMELINE)
        moment = footprint_of.at(TIMELINE.phases[5], 400)
        assert moment.gathered == 4 * (400 + held + held) + 4 * held
        assert footprint_of.between() == FSDP2Footprint(MIXTURE, setting, Workload(2), None).between()
    held = with_experts(4, Workload(2, micro_batches=2)).peak.gradients
    assert held == 4 * (2 * (200 + 800 / 4) + 400)


@pytest.mark.parametrize(
    ("ranks", "sent"),
    [
        (1, 3 / 4 * 1600),  # all experts, three quarters of which others have
        (2, 1 / 2 * 800),  # half of the experts, which one other rank shares
        (4, 0),  # whole experts, which no other rank has
    ],
)
def test_experts_send_tokens_in_the_place_of_weights(ranks, sent):
    work, cluster = Workload(2, seq_length=8), DeviceCluster(4, 1, 1e9)
    setting = Setting("experts", "fsdp2", 4, experts=ranks)
    others = 3 / 4 * (MIXTURE.parameters - 1600)
    # Gathered twice and reduced once in 4 bytes; tokens four times over two layers, two experts each.
    tokens = 4 * 4 * (1 - 1 / ranks) * 2 * 2 * (2 * 8) * 10
    found = FSDP2Footprint(MIXTURE, setting, work, TIMELINE).traffic(cluster)
    assert found == pytest.approx((2 * 4 + 4) * (others + sent) + tokens)


def test_experts_are_divided_inside_a_machine_if_their_number_allows():
    def names(experts, machines):
        shape = replace(MIXTURE, experts=experts)
        return [
            (each.experts, FSDP2Footprint.launch_values(each, DeviceCluster(16, machines, 1e9)))
            for each in FSDP2Footprint.settings(shape, DeviceCluster(16, machines, 1e9), Workload(), False)
            if each.experts > 1
        ]

    assert [ranks for ranks, _ in names(8, 1)] == [8, 8]  # without and with recomputation
    assert [ranks for ranks, _ in names(12, 2)] == [4, 4]
    assert names(7, 1) == names(0, 1) == []
    values = names(8, 2)[0][1]
    assert (values["parallelism.dp_shard_size"], values["parallelism.ep_size"]) == (16, 8)


STAGED = replace(
    SHAPE,
    units=(BLOCK,) * 4,
    first=UnitSizes(300, 300, 30, largest=300),
    last=UnitSizes(100, 100, 20, largest=100),
)
STAGED_TIMELINE = Timeline(
    (
        Phase(None, False, 0, 8000, 0, 0),
        *(Phase(unit, False, 0, 40000 + 24000 * unit, 0, 0) for unit in range(4)),
        Phase(None, False, 0, 160000, 40000, 0),
        Phase(None, True, 0, 170000, 80000, 100),
        *(Phase(unit, True, 0, 48000 + 24000 * unit, 0, 1000) for unit in reversed(range(4))),
        Phase(None, True, 0, 16000, 0, 300),
    )
)


def test_the_first_stage_keeps_the_activations_of_two_micro_batches():
    workload = Workload(batch_size=4, accelerator=False)
    said = footprint(
        STAGED, Setting("pp", "pp", 1, stages=2), workload, lambda numbers, again: STAGED_TIMELINE
    )
    # Two blocks and the embeddings; 4 rows in 4 micro-batches; one waits while the other is in the second block.
    elements = 2 * 1000 + 300
    kept = 8000 + 2 * 24000
    assert said.kept == 4 * elements + 16 + 8 * elements + 4 * 2 + 4 * 8000
    assert said.peak.when == "backward of block 1"
    assert said.peak.gradients == 4 * elements
    assert said.peak.activations == 48000 + 24000 + kept


def test_the_last_stage_has_the_logits():
    workload = Workload(batch_size=4, accelerator=False)
    wide = replace(STAGED_TIMELINE.phases[6], per_sample=900000, logits=800000)
    timeline = Timeline((*STAGED_TIMELINE.phases[:6], wide, *STAGED_TIMELINE.phases[7:]))
    said = footprint(STAGED, Setting("pp", "pp", 1, stages=2), workload, lambda numbers, again: timeline)
    assert said.peak.when == "backward of embeddings, head and loss"
    assert said.peak.logits == 800000
    # Without what the two blocks before keep, and what they and the embeddings have sent.
    assert said.peak.activations == 100000 - 2 * 24000 - 8000
    assert said.peak.weights == 4 * (2 * 1000 + 100) + 16


def test_stages_divide_the_devices_and_need_a_row_each():
    cluster = DeviceCluster(8, 1, 80e9)

    def stages(shape=STAGED, **workload):
        found = PipelineFootprint.settings(shape, cluster, Workload(**workload), False)
        return [(setting.stages, setting.shards) for setting in found]

    assert stages(batch_size=16) == [(2, 4), (4, 2)]
    assert stages(batch_size=2) == [(2, 4)]
    assert stages(batch_size=1) == []
    assert stages(replace(STAGED, first=None), batch_size=16) == []
    values = PipelineFootprint.launch_values(Setting("pp", "pp", 4, stages=2), cluster)
    assert values == {
        "use_parallelism_config": True,
        "parallelism.pp_size": 2,
        "parallelism.dp_replicate_size": 4,
    }


def test_stages_that_fsdp_shards_are_whole_while_a_batch_computes():
    workload = Workload(batch_size=4, accelerator=False)
    said = footprint(
        STAGED,
        Setting("pp x fsdp2", "pp x fsdp2", 2, stages=2),
        workload,
        lambda numbers, again: STAGED_TIMELINE,
    )
    elements = 2 * 1000 + 300
    assert said.kept == 4 * elements / 2 + 16 + (8 * elements + 4 * 2) / 2 + 4 * 8000
    assert said.peak.when == "backward of block 1"
    assert said.peak.gradients == 4 * elements  # of the micro-batches before
    # The buffers, the embeddings, and the block that computes; the one before it is gathered meanwhile.
    assert said.peak.gathered == 4 * 8000 + 4 * (300 + 1000 + 1000)
    assert said.peak.activations == 48000 + 24000 + 8000 + 2 * 24000
    low = footprint(
        STAGED, Setting("pp x fsdp2", "pp x fsdp2", 2, stages=2), replace(workload, precision="bf16"),
        lambda numbers, again: STAGED_TIMELINE,
    )  # fmt: skip
    assert low.peak.gradients == 4 * elements + 2 * 1000  # in float32, and those of the block in bf16
    unknown = footprint(
        STAGED, Setting("pp x fsdp2", "pp x fsdp2", 2, stages=2), workload, lambda numbers, again: None
    )
    assert unknown.peak.when == "last reduction"
    assert unknown.peak.gathered == 4 * elements + 4 * 1000


def test_sharded_stages_need_several_ranks_each():
    cluster, workload = DeviceCluster(8, 1, 80e9), Workload(batch_size=16)
    settings = [*ShardedPipelineFootprint.settings(STAGED, cluster, workload, False)]
    assert [(setting.stages, setting.shards) for setting in settings] == [(2, 4), (4, 2)]
    assert ShardedPipelineFootprint.launch_values(settings[0], cluster) == {
        "use_parallelism_config": True,
        "parallelism.pp_size": 2,
        "parallelism.dp_shard_size": 4,
    }
    sent = ShardedPipelineFootprint(STAGED, settings[0], workload, None).traffic(cluster)
    # No hidden size is known, so no activations; 4 micro-batches gather a stage, and one reduction follows.
    assert sent == (4 + 1) * 4 * 4400 / 2 * 3 / 4
