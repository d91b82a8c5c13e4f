"""What a strategy supports, by device."""

from accel_train.strategies.capabilities import Capabilities


def test_the_precisions_of_a_device_hold_there_and_those_of_all_elsewhere():
    few = Capabilities(precisions=frozenset({"no", "bf16"}), precisions_on={"cpu": frozenset({"no"})})
    assert few.precisions_for("cpu") == {"no"}
    assert few.precisions_for("cuda") == {"no", "bf16"}
    assert Capabilities().precisions_for("cpu") is None
