"""What is said of a world, from what its ranks found."""

from accel_cli.doctor.collectives import NOT_IN_BACKEND
from accel_cli.doctor.verdict import judge


def arrived(hosts, **more):
    return {
        rank: {"host": host, "python": "3.11", "torch": "2.13", "accel": "1", **more.get(host, {})}
        for rank, host in enumerate(hosts)
    }


def result(compute=0.01, problem="", **more):
    collectives = {"all_reduce": {"problem": problem, "seconds": 0.002}}
    return {"compute": compute, "backend": "gloo", "collectives": collectives, "links": [], **more}


def told(*args):
    return {(finding.topic, finding.status): finding.found for finding in judge(*args)}


def test_all_is_well():
    found = told(arrived("aab"), {rank: result() for rank in range(3)}, {"0": 5.0, "2": 5.02})
    assert {status for _, status in found} == {"ok"}
    assert found["versions", "ok"] == "3 ranks on 2 hosts have the same python, torch and accel"
    assert found["clocks", "ok"] == "machines differ by at most 20 ms"
    assert found["collectives", "ok"] == "1 are right by gloo"


def test_other_versions_and_clocks_are_named_with_their_hosts():
    facts = arrived("aab", b={"torch": "2.8"})
    found = told(facts, {rank: result() for rank in range(3)}, {"0": 5.0, "2": 3.5})
    assert found["versions", "problem"] == "torch is 2.13 on a; 2.8 on b"
    assert found["clocks", "warning"] == "b is 1.5 s behind a"


def test_ranks_are_named_that_are_slow_or_wrong():
    results = {0: result(), 1: result(compute=0.05), 2: result(problem="gave [1], expected [2]")}
    found = told(arrived("abc"), results, {})
    assert found["slow rank", "warning"] == "rank 1 on b computes 5.0 times slower than the median"
    assert found["collectives", "problem"] == "all_reduce on rank 2 (c) gave [1], expected [2]"
    assert ("collectives", "ok") not in found


def test_what_the_backend_lacks_is_no_problem():
    results = {rank: result() for rank in range(2)}
    for each in results.values():
        each["collectives"]["reduce"] = {"problem": NOT_IN_BACKEND, "seconds": 0.0}
    found = told(arrived("ab"), results, {})
    assert found["collectives", "ok"] == "1 are right by gloo; gloo has no reduce"


def test_a_rank_that_failed_is_named():
    found = told(
        arrived("ab"), {0: result(), 1: {"error": "broadcast: reset", "collectives": {}, "links": []}}, {}
    )
    assert found["world", "problem"] == "rank 1 on b failed at broadcast: reset"
