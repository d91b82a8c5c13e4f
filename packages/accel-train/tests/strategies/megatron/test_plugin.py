"""Options of Megatron-LM."""

import dataclasses

import pytest

from accel_state.environment import patch_environment
from accel_state.errors import NotAvailableError
from accel_train import Accelerator, MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin


def test_it_selects_the_strategy_and_reads_the_launchers_variables():
    with patch_environment(
        MEGATRON_LM_TP_DEGREE=2, MEGATRON_LM_SEQUENCE_PARALLELISM="true", MEGATRON_LM_GRADIENT_CLIPPING=0.5
    ):
        plugin = MegatronLMPlugin(pp_degree=2)
    assert (plugin.strategy, plugin.tp_degree, plugin.pp_degree) == ("megatron", 2, 2)
    assert plugin.sequence_parallelism is True
    assert plugin.gradient_clipping == 0.5
    plain = MegatronLMPlugin()
    assert (plain.tp_degree, plain.num_micro_batches, plain.gradient_clipping) == (1, 1, 1.0)


@pytest.mark.parametrize("text", ["False", "0", "no"])
def test_truth_values_that_say_no_are_no(text):
    with patch_environment(MEGATRON_LM_NO_SAVE_OPTIM=text, MEGATRON_LM_USE_CUSTOM_FSDP=text):
        plugin = MegatronLMPlugin()
    assert plugin.no_save_optim is False
    assert plugin.use_custom_fsdp is False


def test_the_order_of_positional_arguments_is_that_of_accelerate():
    assert MegatronLMPlugin(2, 2).pp_degree == 2
    names = [field.name for field in dataclasses.fields(MegatronLMPlugin)]
    assert len(names) == len(set(names)) == 63


REFUSED = {
    "use_custom_fsdp": True, "overlap_cpu_optimizer_d2h_h2d": True, "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "pipeline_model_parallel_split_rank": 1,
    "num_layers_per_virtual_pipeline_stage": 1, "train_samples": 9, "lr_decay_samples": 9, "lr_warmup_samples": 9,
    "consumed_samples": [0, 0, 0], "no_wd_decay_cond": len, "scale_lr_cond": len, "lr_mult": 2.0,
    "megatron_dataset_flag": True, "custom_megatron_datasets_provider_function": len, "encoder_seq_length": 8,
    "decoder_seq_length": 8, "tensorboard_dir": "logs", "set_all_logging_options": True,
    "custom_train_step_class": object, "custom_train_step_kwargs": {},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_effect_is_refused_with_what_replaces_it(name):
    with pytest.raises(ValueError, match=rf"^{name}=.* of Megatron-LM is not available: .{{20,}}"):
        MegatronLMPlugin(**{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_parallelism": True}, "tp_degree is 1"),
        ({"decoder_last_pipeline_num_layers": 2}, "pp_degree is 1"),
        ({"context_parallel_size": 2, "attention_backend": False}, "asks for Megatron-core's own"),
        (
            {"context_parallel_size": 2, "attention_softmax_in_fp32": False},
            "which context_parallel_size selects",
        ),
        ({"context_parallel_size": 4, "seq_length": 12}, "seq_length=12 is not a multiple of 8"),
        ({"attention_backend": True, "attention_softmax_in_fp32": False}, "computes the softmax in float32"),
        ({"recompute_granularity": "half"}, "known: full, selective"),
        ({"recompute_granularity": "full"}, "needs recompute_method and recompute_num_layers"),
        ({"recompute_method": "block", "recompute_num_layers": 1}, "need recompute_granularity='full'"),
        ({"recompute_granularity": "full", "recompute_activations": True}, "Give one of them"),
        ({"lr_decay_style": "steep"}, "known: constant, linear"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "give one of them"),
    ],
)
def test_contradictions(fields, message):
    with pytest.raises(ValueError, match=message):
        MegatronLMPlugin(**fields)


def test_without_the_engine_or_a_gpu_nothing_starts():
    with pytest.raises(
        (NotAvailableError, ValueError),
        match=r"needs megatron-core>=0.16. Install it: pip install|does not run on device",
    ):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin())


def test_placeholders():
    with pytest.raises(NotAvailableError, match=r"megatron.core.datasets"):
        MegatronLMDummyDataLoader(seq_length=8)
    scheduler = MegatronLMDummyScheduler(None, total_num_steps=3)
    with pytest.raises(ValueError, match="was not passed to prepare"):
        scheduler.step()
