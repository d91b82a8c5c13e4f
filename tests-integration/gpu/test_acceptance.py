"""Checks with figures of everything that needs an accelerator, each in a process of its own.

They run at full size where there is one, and the same logic at small size, in seconds, on the CPU, where speed and
memory are not judged. The figures are listed at the end of the run; `--junitxml` keeps them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util

import pytest
import torch

from gpu.figures import NotRunError, Run, table
from gpu.registry import CHECKS
from gpu.stable_diffusion import PARAMETERS, VAE, TextEncoder, UNet
from testkit import worlds

ON_CPU = {"HF_HUB_OFFLINE": "1"}
ON_ACCELERATOR = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "false"}


def figures_of(check, run):
    """What a check yields, or why it does not run."""
    module, _, name = check.target.partition(":")
    try:
        return list(getattr(importlib.import_module(module), name)(run))
    except NotRunError as error:
        return str(error)


@pytest.mark.gpu(small_on_cpu=True)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_acceptance(check, tmp_path, record_property):
    absent = [name for name in check.needs if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed")
    full = torch.accelerator.is_available()
    run = Run("accelerator" if full else "cpu", full, tmp_path)
    environ = ON_ACCELERATOR if full else ON_CPU
    [figures] = worlds.run(
        figures_of, 1, check, run, environ=environ, timeout=check.seconds * (1 if full else 2)
    )
    if isinstance(figures, str):
        pytest.skip(figures)
    for figure in figures:
        record_property("figure", {"check": check.name, **dataclasses.asdict(figure)})
    assert [figure for figure in figures if figure.passed is False] == []
    assert any(figure.passed for figure in figures), "nothing was compared with anything"


def test_stable_diffusion_has_its_true_sizes():
    with torch.device("meta"):
        models = {"text_encoder": TextEncoder(), "unet": UNet(), "vae": VAE()}
        assert models["unet"](torch.empty(2, 4, 64, 64), 1.0, torch.empty(2, 77, 768)).shape == (2, 4, 64, 64)
        assert models["vae"](torch.empty(1, 4, 64, 64)).shape == (1, 3, 512, 512)
        assert models["vae"].encode(torch.empty(1, 3, 512, 512)).shape == (1, 8, 64, 64)
    counts = {name: sum(each.numel() for each in model.parameters()) for name, model in models.items()}
    assert counts == PARAMETERS


@pytest.mark.parametrize(
    ("judged", "value", "passed"),
    [(True, 1.0, True), (True, 1.1, False), (True, float("nan"), False), (False, 1.1, None)],
)
def test_speed_is_judged_at_full_size_on_an_accelerator_only(tmp_path, judged, value, passed):
    run = Run("accelerator" if judged else "cpu", True, tmp_path)
    figure = run.at_most("x", value, 1.01, note="why")
    assert figure.passed is passed
    assert figure.note == ("why" if judged else "not judged on the CPU; why")
    assert run.within("x", value, 1.01).passed is (value <= 1.01)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_run_on_an_accelerator_that_is_not_there(tmp_path):
    with pytest.raises(NotRunError, match="no accelerator was found"):
        _ = Run("accelerator", True, tmp_path).device


def test_figures_are_listed():
    rows = [
        {"check": "a", "name": "f", "value": 1.5, "unit": "s", "goal": "≤ 2", "passed": True, "note": "why"},
        {
            "check": "bb",
            "name": "g",
            "value": 12345678.0,
            "unit": "B",
            "goal": "",
            "passed": None,
            "note": "",
        },
        {"check": "c", "name": "h", "value": 3.0, "unit": "x", "goal": "≤ 2", "passed": False, "note": ""},
    ]
    assert [line.rstrip() for line in table(rows).splitlines()] == [
        "check  figure  value      unit  goal  status    note",
        "a      f       1.5        s     ≤ 2   ok        why",
        "bb     g       1.235e+07  B           measured",
        "c      h       3          x     ≤ 2   FAILED",
    ]
