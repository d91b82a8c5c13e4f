"""``accel prove``: show that a script trains the same model on ranks as on one process, or what it does wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from accel_cli.commands.launch import target_of
from accel_cli.dialect import App
from accel_cli.progress import progress
from accel_cli.schema_command import SchemaCommand, steps_of
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.target import check_target

if TYPE_CHECKING:
    from accel_state.config.flags import ParsedFlags

__all__ = ["app"]

app = App()


class ProveCommand(SchemaCommand):
    """The command of ``accel prove``."""

    usage = "[--strategies ddp,fsdp2,…] script.py [the script's own arguments]"
    own = {
        "--strategies S,S,…": "Of ddp, fsdp2, tp, cp, ep, pp. Default: ddp,fsdp2.",
        "--steps N": "Optimizer steps of each prepared optimizer. Default: 3.",
        "--single": "In float32, as the script is written. Default: in float64, where the script can.",
        "--json": "Print the report as JSON.",
        "--config_file FILE": "Configuration file to read.",
    }


@app.command(cls=ProveCommand)
def prove_script(context: typer.Context) -> int:
    """Run the first steps of a script on one process, and on two CPU processes under each strategy, and compare them.

    Losses, gradients of each parameter, norms, weights, logged values and the samples that were read must be the same.
    Ranks divide the batches of the script, so its batch size must be even. The first thing that is wrong is named, with
    the factor that explains it and the line of the script. Exit code 1: something is wrong.

      accel prove train.py --lr 0.1
      accel prove --strategies ddp,fsdp2,tp train.py
    """
    flags = ProveCommand.read(context.args)
    if not flags.rest:
        raise ConfigError("there is no script to prove; example: accel prove train.py --lr 0.1")
    from accel_cli.proof.prove import prove
    from accel_cli.proof.show import as_json, show

    environ = snapshot()
    config = resolve(flags.others.get("config_file"), environ, flags).local()
    target = target_of(config, flags)
    check_target(target, environ)
    with tempfile.TemporaryDirectory(prefix="accel-prove-") as folder, progress("starting") as shown:
        verdicts, facts = prove(
            target,
            environ,
            Path(folder),
            strategies=_strategies(flags),
            steps=steps_of(flags, default=3),
            double="single" not in flags.others,
            tell=shown.now,
        )
    if "json" in flags.others:
        print(json.dumps(as_json(verdicts, facts), indent=2))
    else:
        show(verdicts, facts)
    return int(any(verdict.has_fault for verdict in verdicts))


def _strategies(flags: ParsedFlags) -> list[str]:
    from accel_cli.proof.runs import STRATEGIES

    names = [name.strip() for name in str(flags.others.get("strategies", "ddp,fsdp2")).split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"--strategies names {name!r}; pass some of {', '.join(STRATEGIES)}")
    return names
