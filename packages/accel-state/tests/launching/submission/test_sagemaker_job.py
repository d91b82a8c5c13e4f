"""SageMaker jobs, without AWS's SDK; `tests-integration/engines/test_sagemaker.py` starts them."""

import json

import pytest

from accel_state.config.sagemaker import SageMakerConfig
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.sagemaker_job import (
    Credentials,
    describe_job,
    find_credentials,
    hyperparameters_of,
    plan_job,
)
from accel_state.launching.target import Target

JOB = {
    "ec2_instance_type": "ml.g5.xlarge",
    "iam_role_name": "role",
    "distributed_type": "NO",
    "mixed_precision": "no",
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--a 1 --b 1.5 --c 1e-3 --d -2", {"a": 1, "b": 1.5, "c": 0.001, "d": -2}),
        ("--a True --b False --c true", {"a": True, "b": False, "c": "true"}),
        ("--a=x=y --b-c z -o 3", {"a": "x=y", "b-c": "z", "o": 3}),
        (
            "--a 007 --b nan --c 1_000 --d inf --e 1e999",
            {"a": "007", "b": "nan", "c": "1_000", "d": "inf", "e": "1e999"},
        ),
        ("--a 12345678901234567890", {"a": 12345678901234567890}),
        ("", {}),
    ],
)
def test_options_become_hyperparameters(words, expected):
    found = hyperparameters_of(words.split())
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verbose"], "option --verbose has no value.*--verbose True"),
        (["--verbose", "--lr", "1"], "option --verbose has no value"),
        (["train"], "argument 'train' does not follow an option"),
        (["--a", "1", "2"], "argument '2' does not follow an option"),
        (["--a", "1", "-a", "2"], "option -a is given twice"),
        (["--", "1"], "argument '--'"),
    ],
)
def test_what_is_no_option_with_one_value_is_named(words, said):
    with pytest.raises(ConfigError, match=said):
        hyperparameters_of(words)


def test_the_job_says_everything_but_secrets(tmp_path):
    (tmp_path / "train.py").touch()
    config = SageMakerConfig(**JOB, num_machines=2, aws_access_key_id="AKIA", aws_secret_access_key="hidden")
    job = plan_job(config, Target(str(tmp_path / "train.py"), ("--lr", "0.1")))
    credentials = find_credentials(config)
    assert credentials == Credentials("us-east-1", key="AKIA", secret="hidden")
    shown = describe_job(job, credentials)
    assert not any("hidden" in text or "AKIA" in text for text in (shown, repr(credentials), repr(config)))
    data = json.loads(shown)
    assert (data["source_dir"], data["entry_point"]) == (str(tmp_path), "train.py")
    assert (data["role"], data["instance_count"], data["region"]) == ("role", 2, "us-east-1")
    notes = "; ".join(job.notes)
    assert "the image has Python 3.8" in notes
    assert "requirements.txt does not exist" in notes
    assert "form one world" in notes


@pytest.mark.parametrize("name", ["ec2_instance_type", "iam_role_name"])
def test_what_a_job_needs(tmp_path, name):
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=f"{name} is not set.*pass --{name}"):
        plan_job(SageMakerConfig(**(JOB | {name: None})), Target(str(tmp_path / "train.py")))


def test_only_python_scripts(tmp_path):
    (tmp_path / "train.txt").touch()
    with pytest.raises(LaunchError, match="is not a Python script"):
        plan_job(SageMakerConfig(**JOB), Target(str(tmp_path / "train.txt")))
    with pytest.raises(LaunchError, match="does not exist"):
        plan_job(SageMakerConfig(**JOB), Target(str(tmp_path / "none.py")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("head\ntrain s3://a\n", "line 2: 'train s3://a' has 1 columns"),
        ("head\na\tb\na\tc\n", "line 3: .* occurs twice"),
        ("head\na\t\n", "line 2"),
        (None, "cannot be read"),
    ],
)
def test_tables_with_tabs(tmp_path, text, said):
    (tmp_path / "train.py").touch()
    table = tmp_path / "inputs.tsv"
    if text is not None:
        table.write_text(text)
    config = SageMakerConfig(**JOB, sagemaker_inputs_file=str(table))
    with pytest.raises(ConfigError, match=said):
        plan_job(config, Target(str(tmp_path / "train.py")))


def test_half_a_key():
    with pytest.raises(ConfigError, match="--aws_secret_access_key too"):
        find_credentials(SageMakerConfig(aws_access_key_id="a"))
    with pytest.raises(ConfigError, match="--aws_access_key_id too"):
        find_credentials(SageMakerConfig(aws_secret_access_key="a"))
    assert find_credentials(SageMakerConfig(aws_access_key_id="a", profile="p")) == Credentials(
        "us-east-1", "p"
    )
