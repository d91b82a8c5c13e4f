"""``accel estimate-memory`` against the functions of Accelerate's command, which itself needs the Hub."""

from __future__ import annotations

import json

import pytest
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes

from accel_bigmodel import init_empty_weights
from accel_cli.app import main
from testkit.models import ZOO


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "mixtral"])
def test_the_table_is_the_same(name, tmp_path, capsys):
    import transformers

    architecture = ZOO[name]
    config = architecture.configuration()
    config.architectures = [architecture.model]
    config.save_pretrained(tmp_path)
    dtypes = ["float32", "float16", "int8", "int4"]
    assert main(["estimate-memory", str(tmp_path), "--dtypes", *dtypes, "--json", "--seq_length", "8"]) == 0
    found = json.loads(capsys.readouterr().out)["loading"]
    with init_empty_weights(include_buffers=False):
        model = getattr(transformers, architecture.model)(config)
    total, (largest, _) = calculate_maximum_sizes(model)
    for row, by in zip(found, (1, 2, 4, 8), strict=True):
        most = max(estimate_training_usage(total, row["dtype"]).values())
        assert row["total_size"] == total / by
        assert row["largest_layer"] == largest / by
        assert row["training_with_adam"] == (None if most == -1 else most)
