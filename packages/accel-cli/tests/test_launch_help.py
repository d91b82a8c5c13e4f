"""The help of ``accel launch``."""

from accel_cli.launch_help import launch_help
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of


def test_help_names_every_flag_under_a_topic():
    text = launch_help(100)
    for bound in schema_of(LaunchConfig).options:
        for flag in bound.flags:
            assert f"{flag}" in text
    for title in (
        "Starting and supervising:",
        "Processes and devices:",
        "FSDP:",
        "DeepSpeed:",
        "MPI:",
    ):
        assert f"\n{title}\n" in text
    assert max(map(len, text.splitlines())) <= 130
    titles = [
        line for line in text.splitlines() if line.endswith(":") and not line.startswith((" ", "examples"))
    ]
    assert titles == sorted(titles, key=lambda title: "not available yet" in title), "what works comes first"
