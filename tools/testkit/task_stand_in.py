"""What SkyPilot and dstack do with a task: which variables its nodes get, and what follows from an exit code.

Sources: SkyPilot, "Environment Variables" and "Managed jobs" (``recover_on_exit_codes``); dstack's runner (executor.go)
and job configurators (``_join_shell_commands``), and its reference of ``retry``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testkit.job_stand_in import Container, Decision, Ended

__all__ = ["Dstack", "SkyPilot"]


class _Task:
    """A task whose nodes all start again together, because both engines give a task new machines as a whole."""

    deadline: float | None = None

    def __init__(self, task: Mapping[str, Any], shared: str) -> None:
        self.task = task
        self.shared = shared
        self.counted = 0
        self.succeeded: set[int] = set()
        self.nodes = int(task.get("num_nodes") or task.get("nodes") or 1)
        self.hosts = [f"node-{number}" for number in range(self.nodes)]

    def script(self) -> str:
        """What a shell runs on each node."""
        raise NotImplementedError

    def environ(self, number: int) -> dict[str, str]:
        """The variables of a node."""
        raise NotImplementedError

    def after_failure(self, code: int) -> Decision:
        """What follows from an exit code that is not 0."""
        raise NotImplementedError

    def containers(self) -> Sequence[Container]:
        """See ``Engine``."""
        return [
            Container(
                argv=["bash", "-c", self.script()],
                environ=self.environ(number),
                hostname=host,
                names=(f"{host}.cluster",),
                grace=60.0,
                mounts=[["mkdir", "-p", "{claims}/runs"], ["mount", "--bind", "{claims}/runs", self.shared]],
                shared_memory="256m",
            )
            for number, host in enumerate(self.hosts)
        ]

    def after_exit(self, ended: Ended) -> Decision:
        """See ``Engine``."""
        if ended.disrupted:
            return self.again("the machine was taken away")
        if ended.code == 0:
            self.succeeded.add(ended.number)
            return Decision(end="done" if len(self.succeeded) == self.nodes else "")
        return self.after_failure(ended.code)

    def again(self, why: str) -> Decision:
        """All nodes start again."""
        self.succeeded.clear()
        return Decision(again=frozenset(range(self.nodes)), why=why)

    def after_deadline(self) -> Decision:
        """See ``Engine``."""
        return Decision(end="failed", why="the time is over")


class SkyPilot(_Task):
    """A managed job."""

    def script(self) -> str:
        """See the base class."""
        return "\n".join(filter(None, [self.task.get("setup"), self.task["run"]]))

    def environ(self, number: int) -> dict[str, str]:
        """See the base class."""
        return {
            "SKYPILOT_NODE_IPS": "\n".join(f"{host}.cluster" for host in self.hosts),
            "SKYPILOT_NODE_RANK": str(number),
            "SKYPILOT_NUM_NODES": str(self.nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_train_1-0",
            **(self.task.get("envs") or {}),
        }

    def after_failure(self, code: int) -> Decision:
        """See the base class."""
        recovery = self.task["resources"]["job_recovery"]
        if code in recovery["recover_on_exit_codes"]:
            return self.again(f"exit code {code} is recovered")
        self.counted += 1
        if self.counted <= recovery["max_restarts_on_errors"]:
            return self.again(f"exit code {code} is restarted")
        return Decision(end="failed", why=f"exit code {code}")


class Dstack(_Task):
    """A run of a task."""

    def script(self) -> str:
        """See the base class."""
        return " && ".join(command.strip() for command in self.task["commands"])

    def environ(self, number: int) -> dict[str, str]:
        """See the base class."""
        return {
            "DSTACK_NODES_IPS": "\n".join(f"{host}.cluster" for host in self.hosts),
            "DSTACK_MASTER_NODE_IP": f"{self.hosts[0]}.cluster",
            "DSTACK_NODE_RANK": str(number),
            "DSTACK_NODES_NUM": str(self.nodes),
            "DSTACK_GPUS_PER_NODE": "0",
            "DSTACK_RUN_ID": "3fa85f64-5717-4562-b3fc-2c963f66afa6",
            "DSTACK_RUN_NAME": self.task["name"],
            **dict(setting.split("=", 1) for setting in self.task.get("env") or ()),
        }

    def after_failure(self, code: int) -> Decision:
        """See the base class. Without ``error`` among the events of ``retry`` a failed node ends the run."""
        assert "error" not in self.task["retry"]["on_events"]
        return Decision(end="failed", why=f"exit code {code}")
