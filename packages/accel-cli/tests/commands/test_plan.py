"""``accel plan``."""

import contextlib
import io
import json

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_cli.app import main
from accel_cli.plan_report import gigabytes
from accel_state.config.files import load_config
from accel_train.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin

SETTINGS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 640, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
SMALL = ("--seq_length", "32", "--reserve", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return str(folder)


def run(*words):
    """The exit code, and what was printed on standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *words])
    return code, out.getvalue(), err.getvalue()


def planned(*words):
    code, out, _ = run(*words, "--json")
    return code, json.loads(out)


@pytest.fixture(scope="module")
def facts(folder):
    """Of four devices; a plan takes seconds."""
    return planned(folder, "--devices", "4", "--memory", "1GB", *SMALL)[1]


@pytest.fixture(scope="module")
def advised(folder, tmp_path_factory):
    """The text for the same devices, what was said beside it, and the file that was written."""
    file = tmp_path_factory.mktemp("written") / "run.yaml"
    code, out, err = run(folder, "--devices", "4", "--memory", "1GB", *SMALL, "--write", str(file))
    assert code == 0
    return out, err, file


def test_sizes():
    assert [gigabytes(size) for size in (0, 4e5, 6e5, 1.26e9)] == ["0", "<0.001", "0.001", "1.3"]


def test_the_table_and_the_advice(advised):
    for word in ("LlamaForCausalLM", "fsdp2 + offload", "deepspeed zero 3", "logits", "Advised: "):
        assert word in advised[0]


@pytest.mark.wide
def test_the_reason_is_true_of_the_table(advised, facts):
    """Tensor parallelism sends less than what is advised, and the words say that it is not meant."""
    out = advised[0]
    fitting = {row["name"]: row["traffic"] for row in facts["strategies"] if row["fits"] and not row["costs"]}
    tensor = next(row for row in facts["strategies"] if row["name"] == "tp")
    assert tensor["fits"]
    assert tensor["traffic"] < min(fitting.values())
    least = min(fitting, key=lambda name: fitting[name])
    other = f". {least} would send {gigabytes(fitting[least])} GB, but needs another package.\n"
    own = ", the least of the strategies whose ranks read different batches.\n"
    assert own in out if least == facts["advised"] else other in out


@pytest.mark.full
def test_nothing_fits_and_what_would(capsys, folder, tmp_path):
    file = tmp_path / "none.yaml"
    words = ["--devices", "1", "--memory", "2MB", "--batch_size", "16", *SMALL, "--write", str(file)]
    assert main(["plan", folder, *words]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits: " in out
    assert "- with --" in out
    assert not file.exists()


@pytest.mark.full
def test_adapters_take_less(folder):
    whole, few = (
        planned(folder, "--devices", "1", "--memory", "1GB", *words, *SMALL)[1]
        for words in ([], ["--lora", "2"])
    )
    assert few["trainable"] == 8 * 2 * (4 * 128 + 3 * 192)
    assert few["strategies"][0]["peak"] < 0.6 * whole["strategies"][0]["peak"]


def test_files_without_a_configuration(tmp_path):
    tensors = {f"layers.{n}.weight": torch.zeros(10, 10) for n in range(3)} | {"head.weight": torch.zeros(5)}
    save_file(tensors, tmp_path / "m.safetensors")
    code, facts = planned(str(tmp_path), "--devices", "2", "--device", "H100")
    assert (code, facts["parameters"], facts["blocks"]) == (0, 305, 3)
    assert "leave room for them" in facts["notes"][0]
    assert facts["devices"]["memory"] == 80e9


def test_the_files_that_launch_reads(capsys, folder, tmp_path):
    """What is written builds the plugin with the options of the row."""
    from accel_bigmodel.planning.advice import make_plan
    from accel_bigmodel.planning.footprints.base import DeviceCluster, Workload
    from accel_bigmodel.planning.shape import ModelShape, UnitSizes
    from accel_cli.plan_report import configuration
    from accel_state.config.files import save_config

    end = UnitSizes(5, 5, 5)
    shape = ModelShape(
        "m", (UnitSizes(100, 100, 20),) * 4, UnitSizes(10, 10, 10), hidden_size=32, first=end, last=end
    )
    plan = make_plan(shape, DeviceCluster(8, 2, 1e9), Workload(8, precision="bf16"), lambda *_: None)
    assert len(plan.rows) > 12
    assert {"pp", "pp x fsdp2"} <= {row.setting.strategy for row in plan.rows}
    for number, row in enumerate(plan.rows):
        path = save_config(configuration(plan, row), tmp_path / f"{number}.yaml")
        config = load_config(path)
        setting = row.setting
        assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 2, "bf16")
        if setting.strategy == "fsdp2":
            plugin = FullyShardedDataParallelPlugin.from_section(config.fsdp)
            assert (plugin.is_hybrid, isinstance(plugin.cpu_offload, CPUOffloadPolicy)) == (
                setting.name.startswith("hsdp"), setting.offload,
            )  # fmt: skip
            assert plugin.reshard_after_forward == setting.reshard
            assert bool(plugin.activation_checkpointing) == setting.checkpointing
        elif setting.strategy == "deepspeed":
            plugin = DeepSpeedPlugin.from_section(config.deepspeed)
            assert plugin.zero_stage == setting.stage
            assert (plugin.offload_optimizer_device == "cpu") == setting.offload_optimizer
            assert (plugin.offload_param_device == "cpu") == setting.offload
        else:
            assert config.distributed_type == "MULTI_GPU"
        if setting.stages > 1:
            degrees = config.parallelism
            others = (degrees.dp_replicate_size, degrees.dp_shard_size)
            assert degrees.pp_size == setting.stages
            assert others == ((setting.shards, None) if setting.strategy == "pp" else (None, setting.shards))


def test_writing(capsys, folder, advised):
    _, said, file = advised
    assert "accel launch --config_file" in said
    written = file.read_text()
    assert load_config(file).num_processes == 4
    assert main(["plan", folder, "--devices", "2", "--memory", "1GB", *SMALL, "--write", str(file)]) == 2
    assert "exists and is not changed" in capsys.readouterr().err
    assert file.read_text() == written


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--devices", "2", "--memory", "80GG"], 2, "--memory: '80GG' is not a size"),
        (["--devices", "2", "--memory", "1GB", "--device", "h100"], 2, "leave one of them out"),
        (["--devices", "2", "--device", "h100-81gb"], 2, "did you mean"),
        (["--devices", "2", "--device", "h101"], 2, "did you mean h100-80gb?"),
        (
            ["--devices", "2", "--memory", "80"],
            2,
            "nothing of the 80 bytes of a device; is --memory 80 meant in GB?",
        ),
        (["--memory", "80GB"], 2, "--devices is missing"),
        (["--device", "h100"], 2, "--devices is missing"),
        (["--devices", "2", "--memory", "1GB"], 2, "--reserve 2GB leaves nothing"),
        (["--devices", "3", "--machines", "2", "--memory", "80GB"], 2, "3 devices cannot be divided"),
        (["--optimizer", "adam", "--devices", "2"], 2, "--optimizer is 'adam'"),
    ],
)
def test_wrong_words(capsys, folder, words, code, message):
    assert main(["plan", folder, "--seq_length", "8", *words]) == code
    assert message in capsys.readouterr().err


def test_the_cluster_of_a_job(capsys, folder, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "num_machines: 2\nnum_processes: 16\nsubmit_config:\n  engine: ray\n  gpus_per_machine: H100:8\n"
    )
    asked = ["plan", folder, "--seq_length", "8", "--json"]
    assert main([*asked, "--config_file", str(file)]) == 0
    found = capsys.readouterr().out
    assert main([*asked, "--devices", "16", "--machines", "2", "--device", "h100"]) == 0
    assert found == capsys.readouterr().out
    for flag, value in (("--devices", "2"), ("--device", "h100"), ("--machines", "4")):
        assert main([*asked, "--config_file", str(file), flag, value]) == 2
        assert f"--config_file and {flag} both describe the cluster" in capsys.readouterr().err
    file.write_text("num_machines: 2\nnum_processes: 16\n")
    assert main([*asked, "--config_file", str(file)]) == 2
    assert "set submit_config.gpus_per_machine: H100:8, or pass --memory" in capsys.readouterr().err
    assert main([*asked, "--config_file", str(file), "--memory", "80GB"]) == 0
