"""Kubeflow's trainer and other operators for PyTorch: the variables that torchrun reads as defaults of its flags.

torchrun reads ``PET_<FLAG>`` (torch/distributed/argparse_util.py); the operators set them for each container.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.clusters.allocation import Allocation, Described, Scheduler
from accel_state.clusters.base import DEFAULT_PORT, read_int
from accel_state.errors import ConfigError

__all__ = ["TorchrunVariables"]

_COUNTED = ("auto", "gpu", "cpu", "xpu")
_C10D_PORT = 29400  # of torchrun's c10d rendezvous


class TorchrunVariables(Scheduler):
    """PET_NNODES or PET_NPROC_PER_NODE is set."""

    key = "torchrun"
    name = "torchrun's variables (PET_*)"
    hint = "set PET_NNODES, as Kubeflow's trainer does"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. With a range, ``PET_NNODES=1:4``, the number of machines may change during the run."""
        text = environ.get("PET_NNODES", "").strip()
        per = _processes(environ)
        if not text and per is None:
            return None
        least, most = _range(text or "1")
        if most == 1:
            options = {} if per is None else {"num_processes": per}
            return Allocation(self.name, "machine", 0, 1, options) if options else None
        options = {"num_machines": Described(most, f"PET_NNODES={text}")}
        if least != most:
            options["min_machines"] = Described(least, f"PET_NNODES={text}")
        rank = read_int(environ, "PET_NODE_RANK", below=("the number of nodes in PET_NNODES", most))
        backend = environ.get("PET_RDZV_BACKEND", "static")
        endpoint = environ.get("PET_RDZV_ENDPOINT", "")
        if backend == "static" and rank is None and not endpoint:
            raise ConfigError(
                f"environment variable PET_NNODES is {text}, but neither PET_NODE_RANK nor PET_RDZV_ENDPOINT is set, "
                "so the rank of this machine is unknown; set one of them, or pass --cluster none and --machine_rank"
            )
        if rank is not None:
            options["machine_rank"] = Described(rank, f"PET_NODE_RANK={rank}")
        elif backend == "static":
            backend = "c10d"
        options |= _address(environ, endpoint) | _defaults(environ, backend)
        return Allocation(self.name, "machine", rank, most, options, per)


def _range(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 2:
        raise ConfigError(
            f"environment variable PET_NNODES is {text!r}; expected a number of machines, or a range such as 1:4. "
            "Correct or unset it"
        )
    least, most = int(parts[0]), int(parts[-1])
    if not 0 < least <= most:
        raise ConfigError(
            f"environment variable PET_NNODES is {text!r}; the range must begin above 0 and not end before its "
            f"beginning"
        )
    return least, most


def _processes(environ: Mapping[str, str]) -> Described | None:
    text = environ.get("PET_NPROC_PER_NODE", "").strip()
    if not text or text.lower() in _COUNTED:
        return None
    number = read_int(environ, "PET_NPROC_PER_NODE", minimum=1)
    return None if number is None else Described(number, f"PET_NPROC_PER_NODE={number}")


def _address(environ: Mapping[str, str], endpoint: str) -> dict[str, Described]:
    if endpoint:
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(_C10D_PORT))
        if not port.isdecimal() or not host:
            raise ConfigError(
                f"environment variable PET_RDZV_ENDPOINT is {endpoint!r}; expected host:port, such as 10.0.0.1:29400"
            )
        source = f"PET_RDZV_ENDPOINT={endpoint}"
        return {
            "main_process_ip": Described(host.strip("[]"), source, firm=False),
            "main_process_port": Described(int(port), source, firm=False),
        }
    host = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR") or ""
    found: dict[str, Described] = {}
    if host:
        found["main_process_ip"] = Described(host, f"PET_MASTER_ADDR={host}", firm=False)
    for name in ("PET_MASTER_PORT", "MASTER_PORT"):
        port_number = read_int(environ, name, minimum=1)
        if port_number is not None:
            found["main_process_port"] = Described(port_number, f"{name}={port_number}", firm=False)
            break
    else:
        found["main_process_port"] = Described(DEFAULT_PORT, "torchrun's default", firm=False)
    return found


def _defaults(environ: Mapping[str, str], backend: str) -> dict[str, Described]:
    readers: dict[str, tuple[str, Any]] = {
        "rdzv_conf": ("PET_RDZV_CONF", environ.get("PET_RDZV_CONF")),
        "max_restarts": ("PET_MAX_RESTARTS", read_int(environ, "PET_MAX_RESTARTS")),
        "rdzv_id": ("PET_RDZV_ID", environ.get("PET_RDZV_ID")),
    }
    found = {
        path: Described(value, f"{name}={value}", firm=False)
        for path, (name, value) in readers.items()
        if value is not None and value != ""
    }
    if backend != "static":
        found["rdzv_backend"] = Described(backend, "PET_RDZV_BACKEND", firm=False)
    return found
