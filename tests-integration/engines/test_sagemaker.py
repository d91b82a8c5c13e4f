"""``accel launch`` with a SageMaker configuration, with AWS's real SDK against moto's mock of AWS.

Run with ``hatch run engines:sagemaker``: once with SDK 3, once with SDK 2. Every call that reaches AWS is recorded.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from typing import Any

import pytest

from accel_cli.app import main
from accel_state.launching.submission.sagemaker_job import hyperparameters_of

moto = pytest.importorskip("moto", reason="needs moto and AWS's SDK: hatch run engines:sagemaker")
pytest.importorskip("sagemaker", reason="needs AWS's SDK for SageMaker: hatch run engines:sagemaker")

import boto3  # noqa: E402
import botocore.client  # noqa: E402

SDK = int(importlib.metadata.version("sagemaker").split(".")[0])
sdk_2, sdk_3 = (
    pytest.mark.skipif((SDK < 3) is not old, reason=f"SDK {SDK} is installed; this is about the other one")
    for old in (True, False)
)
REGION = "eu-west-1"
ROLE = "arn:aws:iam::123456789012:role/trainer"
FILE = """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: 'NO'
ec2_instance_type: ml.g5.12xlarge
iam_role_name: trainer
mixed_precision: bf16
num_machines: 2
region: eu-west-1
transformers_version: 4.49.0
pytorch_version: 2.5.1
py_version: py311
base_job_name: my-job
"""
ARGUMENTS = ["--lr", "1e-4", "--flag", "True", "--name", "two words", "--batch-size", "8", "--eps=-0.5"]


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """A mock of AWS with the role; the calls that reach it, as (operation, parameters)."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws_credentials"))
    monkeypatch.setenv("SAGEMAKER_TELEMETRY_OPT_OUT", "true")
    (tmp_path / "aws_credentials").write_text(
        "[work]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = profile-secret\n"
    )
    calls: list[tuple[str, dict[str, Any], str]] = []
    original = botocore.client.BaseClient._make_api_call

    def recording(client, operation, parameters):
        key = client._request_signer._credentials
        calls.append((operation, parameters, key.access_key if key else ""))
        if operation == "SimulatePrincipalPolicy":  # the only call of SDK 3 that moto does not have
            return {"EvaluationResults": [{"EvalActionName": "s3:PutObject", "EvalDecision": "allowed"}]}
        return original(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", recording)
    if SDK >= 3:  # it keeps its first client, with its credentials, for the life of the process
        from sagemaker.core.utils.utils import SingletonMeta

        SingletonMeta._instances.clear()
    with moto.mock_aws(config={"core": {"mock_credentials": False}}):
        iam = boto3.client("iam", region_name=REGION, aws_access_key_id="a", aws_secret_access_key="b")
        iam.create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
        calls.clear()
        yield calls


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder with a script and a configuration file, which is the current one."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('training')\n")
    (tmp_path / "src" / "requirements.txt").write_text("accel-train\n")
    (tmp_path / "job.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*flags: str, script: str = "src/train.py", arguments: list[str] | None = None) -> int:
    given = ARGUMENTS if arguments is None else arguments
    return main(["launch", "--config_file", "job.yaml", *flags, script, *given])


KEYS = ["--aws_access_key_id", "AKIATYPED", "--aws_secret_access_key", "typed-secret"]


def job_of(calls) -> dict[str, Any]:
    (found,) = (parameters for operation, parameters, _ in calls if operation == "CreateTrainingJob")
    return found


def script_arguments(job: dict[str, Any]) -> list[str]:
    """What the container gives to the script: SDK 3's own code; for SDK 2 as its containers do."""
    if SDK >= 3:
        from sagemaker.train.container_drivers.common.utils import hyperparameters_to_cli_args

        return hyperparameters_to_cli_args(job["HyperParameters"])
    own = {k: json.loads(v) for k, v in job["HyperParameters"].items() if not k.startswith("sagemaker_")}
    return [word for name, value in own.items() for word in (f"--{name}", str(value))]


def test_all_arguments_of_the_job(aws, source, capfd):
    (source / "inputs.tsv").write_text(
        "channel_name\tdata_location\ntrain\ts3://bucket/train\ntest\ts3://bucket/test\n"
    )
    (source / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss: ([0-9.]+)\n")
    more = "sagemaker_inputs_file: inputs.tsv\nsagemaker_metrics_file: metrics.tsv\n"
    more += (
        "dynamo_config:\n  dynamo_backend: INDUCTOR\nadditional_args:\n  max_run: 3600\n  volume_size: 77\n"
    )
    (source / "job.yaml").write_text(FILE + more)
    assert launch(*KEYS) == 0
    job = job_of(aws)
    assert job["TrainingJobName"].startswith("my-job-")
    assert job["RoleArn"] == ROLE
    assert job["ResourceConfig"]["InstanceType"] == "ml.g5.12xlarge"
    assert job["ResourceConfig"]["InstanceCount"] == 2
    assert job["ResourceConfig"]["VolumeSizeInGB"] == 77
    assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == 3600
    algorithm = job["AlgorithmSpecification"]
    assert "huggingface-pytorch-training:2.5.1-transformers4.49.0-gpu-py311" in algorithm["TrainingImage"]
    assert f".{REGION}." in algorithm["TrainingImage"]
    assert algorithm["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]
    assert job["Environment"] == {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "false",
    }
    channels = {c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in job["InputDataConfig"]}
    assert channels["train"] == "s3://bucket/train"
    assert channels["test"] == "s3://bucket/test"
    assert script_arguments(job) == [
        "--lr", "0.0001", "--flag", "True", "--name", "two words", "--batch-size", "8", "--eps", "-0.5",
    ]  # fmt: skip
    assert {key for _, _, key in aws} == {"AKIATYPED"}
    shown = "".join(capfd.readouterr())
    assert "the model is at s3://" in shown
    assert "typed-secret" not in shown


@sdk_2
def test_the_script_and_its_folder_are_uploaded_by_sdk_2(aws, source, tmp_path):
    assert launch(*KEYS) == 0
    parameters = job_of(aws)["HyperParameters"]
    assert json.loads(parameters["sagemaker_program"]) == "train.py"
    bucket, _, key = json.loads(parameters["sagemaker_submit_directory"]).removeprefix("s3://").partition("/")
    session = boto3.Session(aws_access_key_id="a", aws_secret_access_key="b", region_name=REGION)
    session.client("s3").download_file(bucket, key, str(tmp_path / "source.tar.gz"))
    with tarfile.open(tmp_path / "source.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["requirements.txt", "train.py"]


@sdk_3
def test_the_script_and_its_folder_are_uploaded_by_sdk_3(aws, source):
    assert launch(*KEYS) == 0
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in job_of(aws)["InputDataConfig"]
    }
    s3 = boto3.client("s3", aws_access_key_id="a", aws_secret_access_key="b", region_name=REGION)

    def stored(uri):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        return {
            item["Key"].removeprefix(prefix).lstrip("/"): (bucket, item["Key"])
            for item in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
        }

    def read(place):
        return s3.get_object(Bucket=place[0], Key=place[1])["Body"].read().decode()

    assert set(stored(channels["code"])) == {"requirements.txt", "train.py"}
    drivers = stored(channels["sm_drivers"])
    assert (
        json.loads(
            read(drivers["source_code.json"] if "source_code.json" in drivers else drivers["sourcecode.json"])
        )["entry_script"]
        == "train.py"
    )
    start = read(drivers["sm_train.sh"])
    assert "basic_script_driver.py" in start
    assert "requirements.txt" in start


@sdk_2
@pytest.mark.parametrize(
    ("machine", "kind", "expected"),
    [
        ("ml.p4d.24xlarge", "DATA_PARALLEL", {"sagemaker_distributed_dataparallel_enabled": "true"}),
        ("ml.g5.12xlarge", "DATA_PARALLEL", {"sagemaker_torch_distributed_enabled": "true"}),
        (
            "ml.p4d.24xlarge",
            "MODEL_PARALLEL",
            {"sagemaker_torch_distributed_enabled": "true", "mp_parameters": '{"tensor_parallel_degree": 4}'},
        ),
    ],
)
def test_distributions_of_sdk_2(aws, source, machine, kind, expected):
    # SageMaker's own library for data parallelism is in PyTorch's older images only.
    text = FILE.replace("'NO'", kind).replace("ml.g5.12xlarge", machine)
    text += 'additional_args: {model_parallel: {tensor_parallel_degree: 4}, image_uri: "i.amazonaws.com/pytorch:1"}\n'
    (source / "job.yaml").write_text(text)
    assert launch(*KEYS) == 0
    job = job_of(aws)
    assert expected.items() <= job["HyperParameters"].items()
    assert job["Environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == kind


@sdk_3
@pytest.mark.parametrize("kind", ["DATA_PARALLEL", "MODEL_PARALLEL"])
def test_distributions_of_sdk_3(aws, source, kind):
    text = FILE.replace("'NO'", kind) + "additional_args: {process_count_per_node: 3"
    text += ", model_parallel: {tensor_parallel_degree: 4}}\n" if kind == "MODEL_PARALLEL" else "}\n"
    (source / "job.yaml").write_text(text)
    assert launch(*KEYS) == 0
    job = job_of(aws)
    places = {c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in job["InputDataConfig"]}
    bucket, _, prefix = places["sm_drivers"].removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", aws_access_key_id="a", aws_secret_access_key="b", region_name=REGION)
    start = s3.get_object(Bucket=bucket, Key=f"{prefix.rstrip('/')}/sm_train.sh")["Body"].read().decode()
    assert "torchrun_driver.py" in start
    divided = json.loads(job["HyperParameters"].get("mp_parameters", "{}"))
    assert divided.get("tensor_parallel_degree") == (4 if kind == "MODEL_PARALLEL" else None)


def test_a_profile_logs_in(aws, source):
    assert launch("--profile", "work") == 0
    assert {key for _, _, key in aws} == {"AKIAPROFILE"}


def test_variables_of_aws_log_in(aws, source, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVARIABLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert launch() == 0
    assert {key for _, _, key in aws} == {"AKIAVARIABLE"}


def test_a_job_that_is_not_waited_for(aws, source, capfd):
    (source / "job.yaml").write_text(FILE + "additional_args: {wait: false}\n")
    assert launch(*KEYS) == 0
    assert "the job is started: my-job-" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "flags", "arguments", "code", "said"),
    [
        (("iam_role_name: trainer", ""), KEYS, [], 2, "iam_role_name is not set in job.yaml"),
        (("ec2_instance_type: ml.g5.12xlarge", ""), KEYS, [], 2, "ec2_instance_type is not set in job.yaml"),
        (("trainer", "stranger"), KEYS, [], 1, "AWS refuses the job"),
        (None, ["--profile", "play"], [], 2, "the AWS profile play does not exist"),
        (None, [], [], 1, "AWS credentials are missing"),
        (None, KEYS[:2], [], 2, "without its other half"),
        (None, KEYS, ["--verbose"], 2, "the script's option --verbose has no value"),
        (("4.49.0", "9.9.9"), KEYS, [], 2, "9.9.9"),
        (("bf16", "fp8"), [*KEYS, "--fp8_backend", "msamp"], [], 2, "fp8 backend MSAMP"),
        (("base_job_name: my-job", "sagemaker_inputs_file: no.tsv"), KEYS, [], 2, "no.tsv cannot be read"),
    ],
)
def test_what_stops_a_job_before_it_starts(aws, source, capfd, change, flags, arguments, code, said):
    if change is not None:
        (source / "job.yaml").write_text(FILE.replace(*change))
    assert launch(*flags, arguments=arguments) == code
    shown = capfd.readouterr()
    assert said in shown.err
    assert "typed-secret" not in shown.err + shown.out
    assert not [operation for operation, _, _ in aws if operation in ("CreateTrainingJob", "PutObject")]


def test_what_scripts_get_is_what_was_typed(aws, source):
    typed = [
        "--a",
        "1",
        "--b",
        "1.5",
        "--c",
        "True",
        "--d",
        "False",
        "--e",
        "x y",
        "--f-g",
        "007",
        "--h",
        "nan",
    ]
    if SDK >= 3:
        typed = [
            word + word[2:] if word in ("--a", "--b", "--c", "--d", "--e", "--h") else word for word in typed
        ]
    assert launch(*KEYS, arguments=typed) == 0
    assert script_arguments(job_of(aws)) == typed
    assert len(hyperparameters_of(typed)) == 7


def test_a_dry_run_needs_no_sdk_and_calls_nothing(aws, source):
    blocked = "import sys; sys.modules.update(sagemaker=None, boto3=None, botocore=None)\n"
    blocked += "from accel_cli.app import main\nsys.exit(main(sys.argv[1:]))"
    words = ["launch", "--config_file", "job.yaml", *KEYS, "--dry-run", "src/train.py", *ARGUMENTS]
    done = subprocess.run([sys.executable, "-c", blocked, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hyperparameters"]["batch-size"] == 8
    assert "typed-secret" not in done.stdout
    assert aws == []
