"""Vertex AI: custom training jobs with several replicas.

CLUSTER_SPEC is JSON (Vertex AI, "Distributed training"): ``{"cluster": {"workerpool0": ["HOST:PORT"], "workerpool1":
["HOST:PORT", …]}, "task": {"type": "workerpool1", "index": 0}, "job": …, "environment": "cloud"}``. The first pool is
the primary replica, the second are the workers, the third parameter servers, the fourth evaluators.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from accel_state.clusters.allocation import Allocation, Scheduler
from accel_state.clusters.base import read_port
from accel_state.errors import ConfigError

__all__ = ["VertexAI"]

_LONGEST = 131_072
"""Characters: the longest variable that Linux allows (MAX_ARG_STRLEN)."""

_KINDS = {dict: "an object", str: "a string", int: "an integer"}

_TRAINING = ("workerpool0", "workerpool1")


class VertexAI(Scheduler):
    """CLUSTER_SPEC has several replicas in the pools that train, the first two.

    Vertex AI's containers for PyTorch also set RANK and WORLD_SIZE, which count replicas, with MASTER_ADDR and
    MASTER_PORT. The address is taken from these where they are set.
    """

    key = "vertex_ai"
    name = "Vertex AI"
    hint = "start it in a custom job with several replicas"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. Another program's CLUSTER_SPEC names no worker pool, and is left alone."""
        text = environ.get("CLUSTER_SPEC", "")
        if "workerpool" not in text:
            return None
        spec = _parsed(text)
        cluster, task = (_part(spec, name, dict) for name in ("cluster", "task"))
        pools = {name: _replicas(cluster, name) for name in _TRAINING}
        replicas = [replica for pool in pools.values() for replica in pool]
        if len(replicas) < 2:
            return None
        kind, index = _part(task, "type", str, "task."), _part(task, "index", int, "task.")
        if kind not in pools:
            raise _wrong(
                f"task.type is {_shown(kind)}, whose replicas are parameter servers or evaluators; accel trains on "
                f"{' and '.join(_TRAINING)}"
            )
        if not 0 <= index < len(pools[kind]):
            raise _wrong(f"task.index is {index}, but cluster.{kind} has {len(pools[kind])} replicas")
        rank = index + (len(pools["workerpool0"]) if kind == "workerpool1" else 0)
        host, _, port = replicas[0].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise _wrong(f"its first replica is {_shown(replicas[0])}; expected HOST:PORT")
        given = environ.get("MASTER_ADDR")
        return self.of_machines(
            (len(replicas), "CLUSTER_SPEC"),
            (rank, "CLUSTER_SPEC"),
            (given, "MASTER_ADDR") if given else (host, "CLUSTER_SPEC"),
            (read_port(environ) or int(port), "CLUSTER_SPEC"),
        )


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > _LONGEST:
        raise _wrong(f"it has {len(text)} characters; at most {_LONGEST} are read")
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"it is not JSON ({error})") from None
    except RecursionError:
        raise _wrong("its JSON is nested too deeply") from None
    if not isinstance(spec, dict):
        raise _wrong(f"it is a {type(spec).__name__}; expected a JSON object")
    return spec


def _part(found: dict[str, Any], name: str, kind: type[Any], path: str = "") -> Any:
    value = found.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _wrong(f"{path}{name} is {_shown(value)}; expected {_KINDS[kind]}")
    return value


def _replicas(cluster: dict[str, Any], name: str) -> list[str]:
    replicas = cluster.get(name) or []  # Vertex AI leaves out pools without replicas
    if not isinstance(replicas, list) or not all(isinstance(replica, str) for replica in replicas):
        raise _wrong(f"cluster.{name} is {_shown(replicas)}; expected a list of HOST:PORT")
    return replicas


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _wrong(reason: str) -> ConfigError:
    # Without the whole text: its job has the arguments of the script, which may hold secrets.
    return ConfigError(
        f"environment variable CLUSTER_SPEC: {reason}. Correct or unset it, or pass --cluster none "
        "(ACCEL_CLUSTER=none) to use this machine alone"
    )
