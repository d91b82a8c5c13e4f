"""``accel rehearse``: simulate one rank of a larger run in one process, and report what would fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from accel_cli.commands.launch import target_of
from accel_cli.dialect import App
from accel_cli.progress import ProgressLine, progress
from accel_cli.schema_command import SchemaCommand, number_of
from accel_state.config.flags import ParsedFlags
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.host.colors import colors_for
from accel_state.launching.engines import check_available
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import plan_world
from accel_state.launching.submission import accelerators_of
from accel_state.launching.target import check_target

if TYPE_CHECKING:
    from accel_cli.rehearsal.run import Rehearsed
    from accel_state.launching.plan import World

__all__ = ["app"]

app = App()


class RehearseCommand(SchemaCommand):
    """The command of ``accel rehearse``."""

    usage = "--num_processes N [flags] script.py [the script's own arguments]"
    own = {
        "--rank R": "The rank to rehearse. Default: 0.",
        "--ranks R,R,…": "Several ranks, one after the other, such as 0,1,last or 0-3; their collectives are compared.",
        "--steps N": "Optimizer steps of each prepared optimizer. Default: 1.",
        "--show_output": "Show what the script prints, on standard error.",
        "--json": "Print the report as JSON; sizes are in bytes.",
        "--config_file FILE": "Configuration file to read.",
    }
    shared = {
        "--num_processes N": "Ranks of the world, over all machines.",
        "--num_machines N": "Machines of the world.",
    }


@app.command(
    cls=RehearseCommand,
    epilog="All flags of accel launch apply, and describe the world: accel launch --help-all.",
)
def rehearse_script(context: typer.Context) -> int:
    """Simulate one rank of a larger run in one process on the CPU: configuration, mesh, prepare and one optimizer step.

    Report what would fail: a degree that does not fit, a loader without data for every rank, a shape that cannot be
    divided, ranks that enter different collectives. Also report what the rank would read, and its memory. Exit code 1:
    something would fail.

      accel rehearse --num_processes 1024 --num_machines 128 train.py --lr 0.1
      accel rehearse --num_processes 64 --use_fsdp --ranks 0,1,last train.py
    """
    flags = RehearseCommand.read(context.args)
    if not flags.rest:
        raise ConfigError(
            "there is no script to rehearse; example: accel rehearse --num_processes 64 train.py --lr 0.1"
        )
    from accel_cli.rehearsal.findings import find
    from accel_cli.rehearsal.run import rehearse_rank
    from accel_cli.rehearsal.show import as_json, as_text
    from accel_cli.render import show_text

    environ = snapshot()
    config = check_available(resolve(flags.others.get("config_file"), environ, flags))
    if config.no_python or config.use_tpu:
        refused = "--no_python" if config.no_python else "--tpu"
        raise ConfigError(
            f"{refused} cannot be rehearsed: the rank is a Python program on the CPU; leave it out"
        )
    strategy = config.strategy
    if strategy is not None and strategy.no_rehearsal:
        raise ConfigError(
            f"{strategy.title} cannot be rehearsed: {strategy.no_rehearsal}; start one step on the GPUs instead"
        )
    if config.num_processes is None and config.submission.gpus_per_machine is not None:
        gpus = config.num_machines * accelerators_of(config)[1]
        config = dataclasses.replace(config, num_processes=max(gpus, 1))
    if config.num_processes is None:
        raise ConfigError(
            "the size of the world is not known: pass --num_processes, such as --num_processes 1024, or a "
            "--config_file that has it"
        )
    config = dataclasses.replace(config, use_cpu=True, gpu_ids=None)
    target = target_of(config, flags)
    check_target(target, environ)
    world = plan_world(config, Accelerators())
    steps = number_of(flags.others, "steps", 1)
    show_output = "show_output" in flags.others
    ranks = []
    silent = "json" in flags.others
    # Without the progress line where the script's own output is shown.
    with contextlib.nullcontext(ProgressLine()) if show_output else progress("starting") as shown:
        for rank in _ranks(flags, world.size):
            shown.now(f"rehearsing rank {rank} of {world.size:,}: {target.name}")
            ranks.append(
                rehearse_rank(config, target, world, rank, environ, steps=steps, show_output=show_output)
            )
            if not silent:
                with shown.paused():
                    _show(ranks, world)
    findings = find(ranks, world.size)
    if silent:
        print(json.dumps(as_json(findings, ranks, world), indent=2))
    else:
        print()
        for line in as_text(findings, ranks, colors_for()).splitlines():
            # Tracebacks and output of the script keep their lines.
            print(line) if line.startswith(" ") else show_text(line)
    return int(any(finding.kind == "error" for finding in findings))


def _show(ranks: Sequence[Rehearsed], world: World) -> None:
    """Print the facts about the last rank, or how it differs from the first."""
    from accel_cli.rehearsal.show import differing, facts
    from accel_cli.render import show_facts

    last = facts(ranks[-1], world)
    if len(ranks) == 1:
        show_facts(last)
    else:
        print()
        show_facts(differing(last, facts(ranks[0], world)))


def _ranks(flags: ParsedFlags, size: int) -> list[int]:
    from accel_cli.rehearsal.run import chosen_ranks

    given = flags.others
    if "rank" in given and "ranks" in given:
        raise ConfigError(f"--rank {given['rank']} and --ranks {given['ranks']} exclude each other; pass one")
    flag = "rank" if "rank" in given else "ranks"
    return chosen_ranks(str(given.get(flag, "0")), size, f"--{flag}")
