"""``accel plan``: memory per rank under every strategy, which of them fit, and the configuration of the best."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from accel_bigmodel.planning.devices import DEVICES
from accel_cli.dialect import App, Command
from accel_cli.models import LIBRARIES, LibraryOption, ModelArgument, TrustOption
from accel_cli.progress import ProgressLine, progress
from accel_cli.sizes import bytes_of
from accel_state.errors import ConfigError

__all__ = ["app"]

app = App()


class _Command(Command):
    choices = {"library_name": LIBRARIES, "device": tuple(DEVICES)}


class _Optimizer(StrEnum):
    adamw = "adamw"
    muon = "muon"
    sgd = "sgd"
    adafactor = "adafactor"
    eight_bits = "8bit"


class _Precision(StrEnum):
    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


@app.command(cls=_Command)
def plan(
    model: ModelArgument,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, help="Number of devices over all machines; by default those of this machine."
        ),
    ] = None,
    machines: Annotated[int, typer.Option("--machines", min=1, help="Number of machines.")] = 1,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config_file",
            help="Configuration file of a job, whose machines and accelerators are the cluster.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Memory of one device, such as 80GB; by default that of this machine's devices."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Model of the device, such as h100-80gb, instead of --memory."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host_memory",
            help="Host memory of one machine, such as 1TB; by default it is not a limit.",
        ),
    ] = None,
    reserve: Annotated[
        str,
        typer.Option(
            "--reserve",
            help="Memory of each device to leave free, for the CUDA context, communication buffers and fragmentation.",
        ),
    ] = "2GB",
    batch_size: Annotated[
        int, typer.Option("--batch_size", min=1, help="Samples per micro-batch on each rank.")
    ] = 1,
    seq_length: Annotated[int, typer.Option("--seq_length", min=1, help="Tokens per sample.")] = 2048,
    optimizer: Annotated[
        _Optimizer, typer.Option("--optimizer", help="Optimizer of the training.")
    ] = _Optimizer.adamw,
    precision: Annotated[
        _Precision, typer.Option("--precision", "--mixed_precision", help="Mixed precision of the training.")
    ] = _Precision.bf16,
    gradient_accumulation_steps: Annotated[
        int, typer.Option("--gradient_accumulation_steps", min=1, help="Micro-batches per optimizer step.")
    ] = 1,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation_checkpointing",
            help="The script recomputes the model's blocks in backward (activation checkpointing), in every strategy.",
        ),
    ] = False,
    lora: Annotated[
        int,
        typer.Option(
            "--lora", min=0, help="Rank of the LoRA adapters that are trained; 0: all weights are trained."
        ),
    ] = 0,
    library_name: LibraryOption = None,
    trust_remote_code: TrustOption = False,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Write the configuration file of the advised strategy here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> int:
    """Show the memory of a rank under every strategy, the strategies that fit, and the advised one.

    The exit code is 0 if something fits, and 1 if nothing does.
    """
    if write is not None and write.expanduser().exists():
        raise ConfigError(f"--write {write} exists and is not changed; remove it, or give another path")
    if config_file is not None:
        flags = {"--devices": devices, "--device": device, "--machines": machines if machines > 1 else None}
        for flag, given in flags.items():
            if given is not None:
                raise ConfigError(
                    f"--config_file and {flag} both describe the cluster; leave one of them out"
                )
        devices, machines, device = _cluster_of_job(config_file, memory)
    with progress("loading torch") as shown:
        from accel_bigmodel.planning.footprints.base import Workload

        cluster = _cluster(devices, machines, memory, device, host_memory, reserve)
        workload = Workload(
            batch_size=batch_size,
            optimizer=optimizer.value,
            precision=precision.value,
            micro_batches=gradient_accumulation_steps,
            frozen_bytes=4 if precision is _Precision.no else 2,
            seq_length=seq_length,
        )
        shown.now(f"finding {model}")
        source = _Source(model, library_name, trust_remote_code, seq_length, workload, shown)
        found, suggested = source.advise(cluster, lora, checkpointing=activation_checkpointing)
    _report(found, suggested, write, as_json)
    return 0 if found.advised is not None else 1


def _report(found: Any, suggested: list[Any], write: Path | None, as_json: bool) -> None:
    """Print a plan with its suggestions, and write the configuration of the advised strategy."""
    from accel_cli import plan_report
    from accel_cli.render import show_text

    if as_json:
        typer.echo(plan_report.as_json(found, suggested))
    else:
        plan_report.show(found, suggested)
    if write is not None:
        written = plan_report.write(found, write)
        told = f"wrote {write}; start it with: accel launch --config_file {write} SCRIPT"
        show_text(f"{write} is not written, because nothing fits" if written is None else told, sys.stderr)


class _Source:
    """The model, and its shape and timelines for a plan, with and without adapters."""

    def __init__(
        self, name: str, library: str | None, trust: bool, length: int, workload: Any, shown: ProgressLine
    ) -> None:
        from accel_cli.models import build_model, find_model

        self.found = find_model(name, library, trust)
        self.length = length
        self.workload = workload
        self.shown = shown
        self.model = None
        if self.found.library is not None:
            shown.now(f"building {self.found.name} without weights, by {self.found.library}")
            self.model = build_model(self.found, trust)

    def advise(self, cluster: Any, rank: int, *, checkpointing: bool) -> tuple[Any, list[Any]]:
        """The plan for adapters of a rank (0: none), and changes after which something fits if nothing does."""
        from accel_bigmodel.planning.advice import Suggestion, suggestions

        found, timelines = self._plan(cluster, rank, checkpointing=checkpointing)
        if found.advised is not None:
            return found, []
        self.shown.now("looking for a change after which something fits")
        suggested = suggestions(found, timelines, checkpointing=checkpointing)
        if not rank:
            adapted = self._plan(cluster, 16, checkpointing=checkpointing, batches=False)[0].advised
            suggested += [] if adapted is None else [Suggestion("--lora 16", adapted)]
        return found, suggested

    def _plan(self, cluster: Any, rank: int, *, checkpointing: bool, batches: bool = True) -> tuple[Any, Any]:
        """The plan for adapters of a rank (0: all weights are trained), and the timelines that it uses.

        If no step of the model can be traced, activations are not in the figures, and a note says so.
        """
        from accel_bigmodel.errors import EstimateError
        from accel_bigmodel.planning.advice import make_plan

        shape, timelines, why = self._of(rank)
        options: dict[str, Any] = {"checkpointing": checkpointing, "batches": batches}
        if timelines is not None:
            try:
                return make_plan(shape, cluster, self.workload, timelines, **options), timelines
            except EstimateError as error:  # also of the cluster: then it is raised again below
                why = str(error)

        def unknown(numbers: str, again: bool) -> None:
            return None

        notes = [f"activations are not in the figures, so leave room for them: {why}"]
        return make_plan(shape, cluster, self.workload, unknown, **options, notes=notes), unknown

    def _of(self, rank: int) -> tuple[Any, Any, str]:
        """The shape and the timelines; instead of the latter None and the reason."""
        from accel_bigmodel.errors import EstimateError
        from accel_bigmodel.planning.shape import shape_of_tensors

        if self.model is None:
            shape = shape_of_tensors(self.found.name, self.found.shapes, adapters=rank)
            return shape, None, "only names and shapes of tensors are known"
        import torch

        from accel_bigmodel.planning.model import shape_of_model, with_adapters
        from accel_bigmodel.planning.timelines import text_inputs, timelines_of

        model = with_adapters(self.model, rank) if rank else self.model
        low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
        frozen = low.get(self.workload.precision) if rank else None
        shape = shape_of_model(model, adapters=rank)
        try:
            timelines = timelines_of(model, text_inputs(model, self.length), frozen=frozen)
        except EstimateError as error:
            return shape, None, str(error)

        def told(numbers: str, again: bool) -> Any:
            self.shown.now(f"tracing a step in {numbers}{', with recomputation' if again else ''}")
            return timelines(numbers, again)

        return shape, told, ""


def _cluster_of_job(file: str, memory: str | None) -> tuple[int, int, str | None]:
    """Devices, machines, and the model of the devices, if ``memory`` does not replace it, of a job's configuration.

    Raises:
        ConfigError: the file does not say which accelerators the machines have.
    """
    from accel_state.config.merge import resolve
    from accel_state.launching.submission import accelerators_of

    config = resolve(file, {}).local()
    kind, number = accelerators_of(config)
    if not number or (not kind and memory is None):
        raise ConfigError(
            f"{file} does not say which accelerators its machines have; set submit_config.gpus_per_machine: H100:8, or "
            "pass --memory (80GB)"
        )
    return number * config.num_machines, config.num_machines, kind.lower() if memory is None else None


def _cluster(
    devices: int | None,
    machines: int,
    memory: str | None,
    device: str | None,
    host_memory: str | None,
    reserve: str,
) -> Any:
    """The cluster to train on."""
    from accel_bigmodel.planning.devices import device_memory
    from accel_bigmodel.planning.footprints.base import DeviceCluster

    if memory is not None and device is not None:
        raise ConfigError("--memory and --device both give the memory of a device; leave one of them out")
    size: float
    if memory is not None:
        size = bytes_of("--memory", memory)
    elif device is not None:
        size = device_memory(device)
    else:
        count, size = _detected()
        devices = count if devices is None else devices
    if devices is None:
        raise ConfigError("--devices is missing; give the number of devices of all machines together")
    kept = bytes_of("--reserve", reserve)
    if kept >= size:
        raise ConfigError(
            f"--reserve {reserve} leaves nothing of the {int(size):,} bytes of a device"
            + (f"; is --memory {memory} meant in GB? Write {memory}GB" if str(memory).isdecimal() else "")
        )
    host = None if host_memory is None else bytes_of("--host_memory", host_memory)
    return DeviceCluster(devices, machines, size, kept, host)


def _detected() -> tuple[int, int]:
    """Accelerators of this machine, and the memory of the smallest."""
    import torch

    from accel_state.host.devices import accelerator_module

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    if kind is None or not count:
        raise ConfigError(
            "this machine has no accelerator whose memory could be read; give --devices, and --memory (80GB) or "
            "--device (h100-80gb)"
        )
    module = accelerator_module(kind.type)
    sizes = [int(module.get_device_properties(index).total_memory) for index in range(count)]
    return count, min(sizes)
