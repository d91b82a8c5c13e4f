"""Clients of Accelerate run unmodified, with the same results on this library as on the real package."""

from __future__ import annotations

import pytest

from testkit import clients


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        pytest.param(scenario, ranks, id=f"{scenario}-{ranks}")
        for scenario in clients.SCENARIOS
        for ranks in scenario.ranks
    ],
)
def test_a_client_gets_the_same_results(scenario, ranks, tmp_path):
    if absent := scenario.missing():
        pytest.skip(f"needs {', '.join(absent)}: hatch run engines:{scenario.engine or 'clients'}")
    found = []
    for name in ("ours", "real"):
        (tmp_path / name).mkdir()
        found.append(clients.run(scenario, ranks, name == "ours", tmp_path / name))
    assert clients.differences(*found, scenario.tolerance) == []
