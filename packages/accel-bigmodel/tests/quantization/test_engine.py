"""Finding the engine of a configuration; the engines themselves are tested in environments that have them."""

import sys

import pytest

from accel_bigmodel import BnbQuantizationConfig, QuantizationError, TorchAoQuantizationConfig
from accel_bigmodel.quantization.engine import quantization_engine
from accel_state.errors import MissingDependencyError


@pytest.mark.parametrize("wrong", [None, {"load_in_8bit": True}, "int8"])
def test_what_is_not_a_configuration(wrong):
    with pytest.raises(
        QuantizationError, match="is not a quantisation configuration; give a BnbQuantizationConfig"
    ):
        quantization_engine(wrong)


@pytest.mark.parametrize(
    ("config", "package"),
    [
        (BnbQuantizationConfig(load_in_8bit=True), "bitsandbytes"),
        (TorchAoQuantizationConfig("int8"), "torchao"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(config, package, monkeypatch):
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("bnb", "ao"):
        monkeypatch.delitem(sys.modules, f"accel_bigmodel.quantization.{name}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(MissingDependencyError, match=rf"pip install '{package}<"):
        quantization_engine(config)
