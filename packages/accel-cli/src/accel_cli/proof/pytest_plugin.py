"""The fixture ``prove``: a test of a script that trains, for the tests of other projects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from accel_cli.proof.findings import Verdict

__all__ = ["prove"]


@pytest.fixture
def prove(tmp_path: Path) -> Callable[..., list[Verdict]]:
    """Return a function that proves a script, and fails the test with what is wrong.

    It takes the path of the script and its arguments, and by name what `accel_cli.proof.prove.ProofOptions` has:
    ``strategies`` (``["ddp", "fsdp2"]``), ``ways`` (``["written"]``) and ``steps`` (3). It returns the verdict on each
    strategy and way; one that cannot take the model has a ``reason``, and fails no test unless all have one.
    """

    def run(script: str | Path, *arguments: str, **options: Any) -> list[Verdict]:
        from accel_cli.proof.findings import passed
        from accel_cli.proof.prove import ProofOptions
        from accel_cli.proof.prove import prove as compare
        from accel_cli.proof.show import in_words
        from accel_state.environment import snapshot
        from accel_state.errors import LaunchError
        from accel_state.launching.target import Target

        target = Target(str(script), arguments)
        try:
            verdicts, _ = compare(target, snapshot(), tmp_path / "proof", ProofOptions(**options))
        except LaunchError as error:
            pytest.fail(str(error), pytrace=False)
        if not passed(verdicts):
            pytest.fail("\n".join(line for verdict in verdicts for line in in_words(verdict)), pytrace=False)
        return verdicts

    return run
