"""The help of ``accel launch``."""

import pytest

from accel_cli.launch_help import launch_help
from accel_cli.launch_topics import TOPICS
from accel_state.config.roots import complete_root
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError


def test_the_first_page_fits_on_one_screen():
    text = launch_help(width=120)
    assert len(text.splitlines()) <= 45
    assert "--help-all" in text
    assert all(topic in text for topic in TOPICS)


def test_every_flag_is_on_the_page_of_all_flags_with_variable_and_key():
    text = launch_help("all", width=100)
    joined = " ".join(text.split())
    for bound in schema_of(complete_root()).options:
        for flag in (*bound.flags, *bound.about.switches):
            assert f"{flag}" in text
        if bound.flags:
            for name in (*bound.variables, *([bound.file_path] if bound.keys else [])):
                assert name in joined
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_a_page_of_its_own_flags(topic):
    text = launch_help(topic, width=100)
    assert f"--help {topic}" in text
    assert text.count("\n  --") >= 1
    assert launch_help(topic.replace("_", "-").upper(), width=100) == text


def test_an_unknown_topic_names_the_near_ones():
    with pytest.raises(ConfigError, match="there is no help about fdsp; did you mean fsdp"):
        launch_help("fdsp")


def test_the_first_screen_fits_a_terminal_of_80_columns():
    assert max(map(len, launch_help(width=80).splitlines())) <= 80
