"""``accel prove``: show that a script trains the same model on ranks as on one process, or what it does wrong."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from accel_cli.alias_folders import environment
from accel_cli.commands.launch import target_of
from accel_cli.dialect import App
from accel_cli.progress import progress
from accel_cli.proof.ways import WAYS
from accel_cli.schema_command import SchemaCommand, number_of
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.target import check_target

if TYPE_CHECKING:
    from accel_cli.proof.prove import ProofOptions
    from accel_state.config.flags import ParsedFlags
    from accel_state.config.launch import LaunchConfig

__all__ = ["app"]

app = App()


class ProveCommand(SchemaCommand):
    """The command of ``accel prove``."""

    usage = "[--strategies ddp,fsdp2,…] script.py [the script's own arguments]"
    own = {
        "--strategies S,S,…": "Of ddp, fsdp2, tp, cp, ep, pp. Default: those of the configuration; else ddp,fsdp2.",
        "--ways W,W,…": f"Of {', '.join(WAYS)}. Default: written.",
        "--quick": "Two steps under ddp and fsdp2, as the script is written.",
        "--thorough": "In all ways.",
        "--steps N": "Optimizer steps of each prepared optimizer. Default: 3.",
        "--ranks N": "How many ranks: 2 or 4. Default: 2.",
        "--single": "In float32, as the script is written. Default: in float64, where the script can.",
        "--layers N": "Blocks that models keep of each stack of equal ones. Default: all that the memory holds.",
        "--resume_with ARGS": "Arguments, in quotes, with which the script continues from a checkpoint.",
        "--limit SECONDS": "Time that each run may take. Default: 600.",
        "--devices": "On the accelerators of this machine. Default: on CPUs.",
        "--overwrite": "Let the script overwrite files outside of the current folder.",
        "--as_accelerate": "Let this library answer `import accelerate`, as accel launch --as_accelerate does.",
        "--json": "Print the report as JSON.",
        "--config_file FILE": "Configuration file to read.",
    }


@app.command(cls=ProveCommand)
def prove_script(context: typer.Context) -> int:
    """Run the first steps of a script on one process, and on two CPU processes under each strategy, and compare them.

    Losses, gradients of each parameter, norms, weights, logged values and the samples that were read must be the same.
    Ranks divide the batches of the script, so its batch size must be even. The first thing that is wrong is named, with
    the factor that explains it and the line of the script. Exit code 1: something is wrong, or nothing was compared.
    The script writes into a scratch folder.

      accel prove train.py --lr 0.1
      accel prove --thorough --strategies ddp,fsdp2,tp train.py
    """
    flags = ProveCommand.read(context.args)
    if not flags.rest:
        raise ConfigError("there is no script to prove; example: accel prove train.py --lr 0.1")
    from accel_cli.proof.findings import passed
    from accel_cli.proof.prove import prove
    from accel_cli.proof.show import as_json, show

    environ = snapshot()
    if "as_accelerate" in flags.others:
        environ = environment(environ)
    config = resolve(flags.others.get("config_file"), environ, flags).local()
    target = target_of(config, flags)
    check_target(target, environ)
    options = _options(flags, config)
    with tempfile.TemporaryDirectory(prefix="accel-prove-") as folder, progress("starting") as shown:
        verdicts, facts = prove(target, environ, Path(folder), options, shown.now)
    if "json" in flags.others:
        print(json.dumps(as_json(verdicts, facts), indent=2))
    else:
        show(verdicts, facts)
    return int(not passed(verdicts))


def _options(flags: ParsedFlags, config: LaunchConfig) -> ProofOptions:
    from accel_cli.proof.prove import ProofOptions
    from accel_cli.proof.runs import STRATEGIES

    given, quick, ranks = flags.others, "quick" in flags.others, number_of(flags.others, "ranks", 2)
    if quick and "thorough" in given:
        raise ConfigError("--quick and --thorough exclude each other; pass one of them")
    if ranks not in (2, 4):
        raise ConfigError(f"--ranks is {ranks}; strategies divide a model over 2 or 4 ranks")
    sizes = {name: getattr(config.parallelism, f"{name}_size") for name in ("tp", "cp", "ep", "pp")}
    own = [name for name, size in sizes.items() if (size or 1) > 1]
    usual = ["ddp", *(["fsdp2"] if config.use_fsdp or not own else []), *own]
    return ProofOptions(
        strategies=_names("strategies", given, STRATEGIES, ["ddp", "fsdp2"] if quick else usual),
        ways=_names("ways", given, WAYS, list(WAYS) if "thorough" in given else ["written"]),
        steps=number_of(given, "steps", 2 if quick else 3),
        ranks=ranks,
        double="single" not in given,
        layers=number_of(given, "layers", 0),
        resume_with=tuple(shlex.split(str(given.get("resume_with", "")))),
        limit=float(number_of(given, "limit", 600)),
        devices="devices" in given,
        overwrite="overwrite" in given,
    )


def _names(flag: str, given: Mapping[str, Any], known: Iterable[str], default: list[str]) -> list[str]:
    if flag not in given:
        return default
    names = [name.strip() for name in str(given[flag]).split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--{flag} names {name!r}; pass some of {', '.join(known)}")
    return names
