"""The names of faults, from records that a test writes: what ranks did, and what one process does."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_cli.proof.compare import ORDER, Recorded, StepRecord, differences
from accel_cli.proof.findings import ADVICE, examine, failed
from accel_cli.proof.runs import SEED, ProofRun

torch.manual_seed(0)
PARTS = [
    {name: torch.randn(6, 5, dtype=torch.float64) for name in ("a.weight", "b.weight")} for _ in range(2)
]
"""The gradients of the samples of each rank."""
BLOCKS = [torch.randn(6, 5, dtype=torch.float64) for _ in range(4)]
MEAN = {name: (PARTS[0][name] + PARTS[1][name]) / 2 for name in PARTS[0]}


def step(gradients=MEAN, **other):
    weights = {name: 1 - 0.1 * value for name, value in gradients.items()}
    facts = {
        "losses": [1.0], "rank_losses": [], "items": [0],
        "rows": Counter("abcd"), "own_rows": [Counter("ab"), Counter("cd")],
        "norms": [3.0], "rates": [0.1], "metrics": [{"loss": 1.0}], "gradients": gradients, "weights": weights,
        "gradients_apart": {}, "weights_apart": {}, "evaluated": Counter(), "own": [], "terms": [],
        "places": {"losses": "train.py:7", "metrics": "train.py:9"},
    }  # fmt: skip
    return StepRecord(**facts | other)


def recorded(size, *steps, name="ddp", **about):
    facts = {
        "dtypes": ["torch.float64"],
        "normalises_batches": False,
        "divides_sequences": False,
        "reads": True,
        "schedules": False,
        "noise": {"drawn": 0, "dropout": 0, "seed": SEED},
    }
    return Recorded(name, facts | about, size, [SEED] * size, list(steps))


ONE = recorded(1, step(), name="one process")


def ranks(gradients=MEAN, parts=PARTS, **other):
    """Two ranks, and what the samples of each contribute."""
    return recorded(2, step(gradients, own=[[parts[0]], [parts[1]]], **other))


def kinds(verdict):
    return [finding.kind for finding in verdict.findings]


def test_equal_runs_have_no_findings():
    verdict = examine(ONE, ranks(), ranks())
    assert (verdict.differ, verdict.findings, verdict.has_fault) == ([], [], False)


def scaled(factor, parts=MEAN):
    return {name: factor * value for name, value in parts.items()}


def test_a_loss_that_the_script_scales():
    here = ranks(scaled(2), [scaled(2, part) for part in PARTS], losses=[2.0], norms=[6.0])
    [finding] = examine(ONE, here, here).findings
    assert finding.kind == "scaled loss"
    assert "(train.py:7) is x2" in finding.text


@pytest.mark.parametrize(
    ("gradients", "kind", "said"),
    [
        (scaled(2), "summed", "summed over ranks, not averaged (x2)"),
        (scaled(0.5), "divided", "divided once too often (x1/2)"),
        (scaled(3), "scaled", "scaled by 3"),
        (scaled(0.8), "norm", "x0.8 of those of one process"),
        (scaled(0), "zero", "zero"),
        (PARTS[1], "one rank", "only of the samples of rank 1"),
        (scaled(0.5, PARTS[0]), "one rank", "only of the samples of rank 0"),
        ({name: value + 1 for name, value in MEAN.items()}, "gradient", "another value (relative difference"),
        ({name: value[:3] for name, value in MEAN.items()}, "shape", "of shape [3, 5] instead of [6, 5]"),
    ],
)
def test_what_ranks_did_with_gradients(gradients, kind, said):
    weights = {name: 1 - 0.1 * value for name, value in MEAN.items()}
    verdict = examine(ONE, recorded(2, step(gradients, weights=weights), name="tp"), ranks())
    [finding] = verdict.findings
    assert (finding.kind, finding.fault) == (kind, True)
    assert said in finding.text
    assert "all parameters" in finding.text
    assert finding.wants == (("terms",) if kind == "gradient" else ())
    assert verdict.differ == ["gradients"]


def test_what_was_wrong_before_all_were_clipped():
    one = recorded(1, step({str(number): value for number, value in enumerate(BLOCKS)}), name="one process")
    here = {str(number): 0.7 * value for number, value in enumerate(BLOCKS)} | {"2": 1.4 * BLOCKS[2]}
    [finding] = examine(one, recorded(2, step(here), name="tp"), None).findings
    assert finding.kind == "summed"
    assert "wrong; 2: summed over ranks, not averaged (x2)" in finding.text


def test_no_factor_is_read_from_a_single_number():
    one = recorded(1, step(MEAN | {"bias": torch.ones(1).double()}), name="one process")
    here = MEAN | {"bias": torch.full((1,), 0.7).double()}
    [finding] = examine(one, recorded(2, step(here), name="tp"), ranks()).findings
    assert finding.kind == "gradient"
    assert "bias: another value" in finding.text


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        (PARTS, "not reduced", "a.weight: each rank has a summand"),
        ([PARTS[0], scaled(3, PARTS[1])], "by rank", "a.weight: another one on each rank"),
    ],
)
def test_gradients_that_ranks_do_not_have_alike(values, kind, said):
    """The sum is right, or nothing is; weights then drift apart as well."""
    right = MEAN | {"a.weight": 2 * MEAN["a.weight"]}
    one = recorded(1, step(right), name="one process")
    apart = {"a.weight": [value["a.weight"] for value in values]}
    here = step(right | {"a.weight": apart["a.weight"][0]}, gradients_apart=apart, weights_apart=apart)
    [finding] = examine(one, recorded(1, here, name="tp"), None).findings
    assert finding.kind == kind
    assert said in finding.text


@pytest.mark.parametrize("kind", ["weights", "losses"])
def test_ranks_that_hold_other_weights(kind):
    """They differ after a step, or the next loss is the first to tell."""
    weights = {name: 1 - 0.1 * value for name, value in MEAN.items()}
    apart = {"b.weight": [weights["b.weight"], 2 * weights["b.weight"]]}
    here = ranks(weights_apart=apart, losses=[1.0 if kind == "weights" else 1.1])
    verdict = examine(ONE, here, here)
    [finding] = verdict.findings
    assert (verdict.differ[0], finding.kind) == (kind, "ranks apart")
    assert "after step 1 ranks do not have the same values of b.weight" in finding.text


def test_a_term_of_the_loss_that_is_scaled():
    """The second counts three times; clipping scales both."""
    first = {name: torch.randn_like(value) for name, value in MEAN.items()}
    second = {name: value - first[name] for name, value in MEAN.items()}
    terms = recorded(1, step(terms=[first, second]), name="one process")
    parts = [{name: value + 2 * second[name] for name, value in part.items()} for part in PARTS]
    mean = {name: first[name] + 3 * second[name] for name in MEAN}
    for here in (
        recorded(1, step(scaled(0.4, mean), losses=[2.0]), name="tp"),
        ranks(mean, parts, losses=[2.0]),
    ):
        [finding] = examine(ONE, here, here).findings
        assert "terms" in finding.wants
        [finding] = examine(ONE, here, here, terms=terms).findings
        assert (finding.kind, finding.fault) == ("scaled term", True)
        assert (
            "(train.py:7) is a sum of 2 terms, and term 2, of a.weight, b.weight, counts x3" in finding.text
        )
    other = recorded(1, step({name: value**3 for name, value in MEAN.items()}, losses=[2.0]), name="tp")
    assert kinds(examine(ONE, other, None, terms=terms)) == ["gradient"]


def test_parameters_are_grouped_by_what_happened():
    gradients = {"a.weight": 2 * MEAN["a.weight"]}
    [finding] = examine(ONE, recorded(2, step(gradients), name="tp"), ranks()).findings
    assert "a.weight: summed over ranks" in finding.text
    assert "b.weight: missing" in finding.text


def test_counts_that_differ_between_ranks_are_told_from_batch_norm_and_contrast():
    whole = {name: 0.7 * PARTS[0][name] + 0.3 * PARTS[1][name] for name in MEAN}
    one = recorded(1, step(whole), name="one process")
    [finding] = examine(one, ranks(losses=[1.1]), ranks()).findings
    assert finding.kind == "unequal counts"
    assert "rank 0 70.0%, rank 1 30.0%" in finding.text
    assert finding.wants == ("swapped",)
    other = recorded(1, step({name: value**3 for name, value in MEAN.items()}), name="one process")
    assert kinds(examine(other, ranks(losses=[1.1]), ranks())) == ["contrasts rows"]
    assert not examine(other, ranks(losses=[1.1]), ranks()).has_fault
    other.about["normalises_batches"] = True
    assert kinds(examine(other, ranks(losses=[1.1]), ranks())) == ["batch norm"]


def test_few_numbers_do_not_explain_counts():
    """As many unknown shares as numbers explain any gradient."""
    parts = [{"a": torch.tensor([1.0, 0.0]).double()}, {"a": torch.tensor([0.0, 1.0]).double()}]
    one = recorded(1, step({"a": torch.tensor([0.9, 0.1]).double()}), name="one process")
    mean = {"a": torch.tensor([0.5, 0.5]).double()}
    assert kinds(examine(one, ranks(mean, parts), ranks(mean, parts))) == ["contrasts rows"]


def test_items():
    one = recorded(1, step(items=[504.0]), name="one process")
    [finding] = examine(one, ranks(losses=[1.1], items=[496.0]), ranks()).findings
    assert finding.kind == "other items"
    assert "(train.py:7) are sums over 496 items, and over 504 on one process" in finding.text
    assert "this rank's samples" in finding.advice
    cp = recorded(2, step(losses=[1.1], items=[496.0]), name="cp", divides_sequences=True)
    [finding] = examine(one, cp, ranks()).findings
    assert "shift labels over the whole sequence" in finding.advice


def test_parts_of_sequences_of_which_each_rank_makes_its_own_mean():
    """Parts are of the run itself, because ranks do not divide rows."""
    about = {"divides_sequences": True}
    one = recorded(1, step({name: value**3 for name, value in MEAN.items()}), name="one process")
    for first, kind in ((1.0 + 3 / 7, "unequal counts"), (1.0 + 1 / math.pi, "divided sequence")):
        here = step(losses=[1.1], rank_losses=[[first, 2 / 3]], own=[[PARTS[0]], [PARTS[1]]])
        [finding] = examine(one, recorded(1, here, name="cp", **about), None).findings
        assert (finding.kind, finding.fault) == (kind, True)
        assert ("rank 0 43.8%, rank 1 56.2%" in finding.text) == (kind == "unequal counts")


def test_micro_batches_that_count_as_much():
    """Shares that differ among the micro-batches of a rank tell it from a sum over the whole window."""
    passes = [[part, {name: value.roll(1, 0) for name, value in part.items()}] for part in PARTS]
    for shares, said in (
        ((0.7, 0.3, 0.6, 0.4), "rank and micro-batch"),
        ((0.7, 0.3, 0.7, 0.3), "each rank counts"),
    ):
        whole = {
            name: sum(
                shares[2 * number + rank] * passes[rank][number][name] for rank in (0, 1) for number in (0, 1)
            )
            for name in MEAN
        }
        mean = {name: sum(one[name] for both in passes for one in both) / 2 for name in MEAN}
        here = recorded(2, step(mean, losses=[1.1], own=passes))
        [finding] = examine(recorded(1, step(whole), name="one process"), here, here).findings
        assert finding.kind == "unequal counts"
        assert said in finding.text


def test_samples():
    same = recorded(2, step(rows=Counter("aabb"), own_rows=[Counter("ab"), Counter("ab")]))
    assert kinds(examine(ONE, same, None)) == ["same samples"]
    mixed = {"rows": Counter("abce"), "own_rows": [Counter("ab"), Counter("ce")]}
    assert examine(ONE, recorded(2, step(**mixed)), None).findings == [], "padded to the longest of a batch"
    [finding] = examine(ONE, recorded(2, step(losses=[2.0], **mixed)), None).findings
    assert finding.kind == "other samples"
    assert "lacks 1 samples of the step of one process, and has 1 others" in finding.text
    twice = {"rows": Counter("abcdab"), "own_rows": [Counter("abc"), Counter("dab")]}
    [finding] = examine(ONE, recorded(2, step(losses=[2.0], **twice)), None).findings
    assert (finding.kind, finding.fault) == ("repeated samples", False)
    assert "drop_last" in finding.advice


def test_a_loss_that_depends_on_the_rank_is_told_from_contrast():
    other = recorded(1, step({name: value**3 for name, value in MEAN.items()}), name="one process")
    here = ranks(losses=[1.1])
    assert kinds(examine(other, here, here, swapped=ranks())) == ["contrasts rows"]
    moved = [PARTS[0], {name: value + 1 for name, value in PARTS[1].items()}]
    [finding] = examine(other, here, here, swapped=ranks(parts=moved)).findings
    assert (finding.kind, finding.fault) == ("by rank", True)
    # Scaled on one rank: as if ranks had other counts, until they have each other's samples.
    whole = {name: (PARTS[0][name] + 2 * PARTS[1][name]) / 2 for name in MEAN}
    here = ranks(whole, [PARTS[0], scaled(2, PARTS[1])], losses=[1.5])
    assert kinds(examine(ONE, here, here)) == ["unequal counts"]
    [finding] = examine(ONE, here, here, swapped=ranks(parts=[scaled(2, PARTS[0]), PARTS[1]])).findings
    assert finding.kind == "by rank"
    assert "(on rank 0 x0.5 of that)" in finding.text


def test_logged_values_that_print_alike_are_equal_and_named_ones_are_left_out():
    here = ranks(metrics=[{"loss": 1.0 + 1e-8, "tokens/s": 5.0}])
    one = recorded(1, step(metrics=[{"loss": 1.0, "tokens/s": 1.0}]), name="one process")
    assert [finding.kind for finding in examine(one, here, here).findings] == ["metric"]
    assert examine(one.without({"tokens/s"}), here, here).findings == []


def test_norms_rates_weights_and_metrics():
    [finding] = examine(ONE, ranks(norms=[3 * math.sqrt(2)]), ranks()).findings
    assert finding.kind == "norm"
    assert "once for each" in finding.text
    [finding] = examine(ONE, ranks(rates=[0.05]), ranks()).findings
    assert finding.kind == "schedule"
    assert "0.1 on one process" in finding.text
    one = recorded(1, *(step(rates=[0.1, rate]) for rate in (0.9, 0.8, 0.7)), name="one process")
    fast = recorded(2, *(step(rates=[0.1, rate]) for rate in (0.9, 0.7, 0.5)))
    [finding] = examine(one, fast, None).findings
    assert "of step 2 is 0.7, and 0.8 on one process, which has that one in step 3" in finding.text
    [finding] = examine(ONE, ranks(metrics=[{"loss": 2.0}]), ranks()).findings
    assert finding.kind == "metric"
    assert "logged loss is 2, and 1 on one process (train.py:9)" in finding.text
    one = recorded(1, step(evaluated=Counter("xyz")), name="one process")
    [finding] = examine(one, ranks(metrics=[{"loss": 1.2}], evaluated=Counter("xyzx")), ranks()).findings
    assert finding.kind == "padding"
    assert "ranks repeat rows (1)" in finding.text
    assert kinds(examine(ONE, ranks(weights=scaled(3)), ranks())) == ["weights"]
    [finding] = examine(ONE, ranks(losses=[5.0]), ranks()).findings
    assert finding.kind == "loss"


def test_noise_that_ranks_share_is_a_note():
    here = replace(ranks(), seeds=[1, 1])
    here.about["noise"] = {"drawn": 3, "dropout": 0, "seed": 1}
    verdict = examine(ONE, here, ranks())
    assert kinds(verdict) == ["shared noise"]
    assert not verdict.has_fault
    assert kinds(examine(ONE, replace(here, seeds=[1, 2]), ranks())) == []


def test_rounding_is_no_difference():
    single = {"dtypes": ["torch.float32"]}
    near = recorded(
        2, step({name: value * (1 + 1e-5) for name, value in MEAN.items()}, losses=[1.0 + 1e-6]), **single
    )
    assert examine(recorded(1, step(), **single), near, None).findings == []
    assert differences(ONE, near, 1e-9)[0].kind == "losses"


def test_a_run_that_fails():
    said = "accel_train.errors.PrepareError: no plan for Net"
    assert failed(ProofRun("tp", [], said, 1, Path())).reason == said
    [finding] = failed(ProofRun("ddp", [], f"Traceback\n{said}\n", 1, Path())).findings
    assert finding.kind == "fails"
    assert said in finding.text
    [finding] = failed(ProofRun("fsdp2", [], "ZeroDivisionError: division by zero", 1, Path())).findings
    assert "--use_fsdp" in finding.advice
    assert failed(ProofRun("ddp", [], "", 7, Path())).differ == ORDER
    odd = failed(
        ProofRun("ddp", [], "ValueError: batch_size 3: split_batches=True cuts each batch", 1, Path())
    )
    assert "no multiple of the number of ranks" in odd.reason
    died = "accel_state.errors.LaunchError: rank 0 of 2 failed (ended by SIGABRT)"  # refuses nothing
    assert failed(ProofRun("fsdp2", [], died, 1, Path())).has_fault
    told = ProofRun("ddp", [], "RuntimeError:\nsome tensors share memory\n", 1, Path())
    assert told.failure == "RuntimeError: some tensors share memory"
    assert "before the first step" in ProofRun("ddp", [], "done\n", 0, Path()).failure
    frames = 'File "/app/train.py", line 7, in main\nFile "/x/site-packages/torch/f.py", line 9, in call\n'
    told = ProofRun("ddp", [], f"{frames}ValueError: no such row\n", 1, Path())
    assert told.failure == "ValueError: no such row (train.py:7 in main)"


def test_what_cannot_be_compared_has_a_reason():
    other = step(rows=Counter("abef"), own_rows=[Counter("ab"), Counter("ef")], gradients=PARTS[0])
    assert "each rank has samples of its own" in examine(ONE, recorded(2, other, reads=False), None).reason
    later = recorded(2, step(), replace(other, gradients=MEAN), reads=False)  # it has read alike before
    verdict = examine(recorded(1, step(), step(PARTS[0]), name="one process"), later, None)
    assert kinds(verdict) == ["other samples"]
    noisy = recorded(1, step(), noise={"drawn": 2, "dropout": 0, "seed": SEED})
    assert "draws noise" in examine(noisy, recorded(1, step(PARTS[0]), name="cp"), None).reason
    assert not examine(noisy, recorded(1, step(PARTS[0]), name="tp"), None).reason


def test_ranks_that_read_the_same_are_a_fault():
    alike = step(PARTS[0], rows=Counter("abab"), own_rows=[Counter("ab"), Counter("ab")])
    for reads in (True, False):
        verdict = examine(ONE, recorded(2, alike, reads=reads), None)
        assert (kinds(verdict), verdict.has_fault) == (["same samples"], True)


def test_rates_that_are_planned_for_ranks_are_a_note():
    one = recorded(1, step(rates=[1.0]), step(rates=[0.5]), step(rates=[0.0]), name="one process")
    rates = [step(rates=[rate]) for rate in (1.0, 0.75, 0.5)]
    verdict = examine(one, recorded(2, *rates, schedules=True), None)
    assert (kinds(verdict), verdict.has_fault) == (["planned for ranks"], False)
    assert "planned to advance 2 times in a step" in verdict.findings[0].text
    assert kinds(examine(one, recorded(2, *rates), None)) == ["schedule"]  # one that is not prepared
    for factor in (2, math.sqrt(2)):
        rates = [step(rates=[factor * rate]) for rate in (1.0, 0.5, 0.0)]
        verdict = examine(one, recorded(2, *rates), None)
        assert (kinds(verdict), verdict.has_fault) == (["planned for ranks"], False)
    assert kinds(examine(one, recorded(2, *(step(rates=[rate]) for rate in (2.0, 0.5, 0.0))), None)) == [
        "schedule"
    ]


def test_a_pass_that_a_rank_leaves_out_is_told():
    [finding] = examine(ONE, ranks(losses=[1.0, 1.0]), ranks()).findings
    assert (finding.kind, finding.text) == ("passes", "step 1 has 2 losses, and 1 on one process")


def test_kinds_that_the_guide_names_have_advice():
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "prove.md").read_text()
    for kind in ADVICE:
        assert re.search(rf"[|,*] ?{kind}\b", guide), kind
