"""Scripts of ``accelerate.test_utils.scripts``: checks of the world that they run in."""

from __future__ import annotations

import tempfile
from pathlib import Path

from accel_cli.sanity.world import run_checks
from accel_train import Accelerator, PartialState, broadcast_object_list


def check_world() -> None:
    """Check processes, collectives, data, training and saving, as ``accel test`` does. Collective.

    Raises:
        AssertionError: a check failed.
    """
    _check()


def check_collectives() -> None:
    """Check collectives. Collective.

    Raises:
        AssertionError: one gave a wrong result.
    """
    _check("collectives")


def check_training() -> None:
    """Check that training has the losses and weights of one process. Collective.

    Raises:
        AssertionError: it has others.
    """
    _check("training")


def say_where() -> None:
    """Print on the main process how many ranks run, and on which kind of device."""
    state = PartialState()
    state.print(f"Successfully ran on {state.num_processes} x {state.device.type}")


def _check(*names: str) -> None:
    accelerator = Accelerator()
    with tempfile.TemporaryDirectory(prefix="accel-test-") as own:
        folder = broadcast_object_list([own])[0]
        results = run_checks(accelerator, Path(folder), names or None)
        accelerator.wait_for_everyone()
    problems = [problem for result in results for problem in result["problems"]]
    assert not problems, "; ".join(problems)
    accelerator.print(f"All checks passed: {', '.join(result['name'] for result in results)}")
