"""``accel jobs``: the jobs that ``accel launch --submit`` has started, on every engine alike."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from accel_cli.dialect import App
from accel_cli.render import show_table
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.config.sections.submission import SubmitSection
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.submission import SUBMISSIONS
from accel_state.launching.submission.tools import printable

if TYPE_CHECKING:
    from accel_state.launching.submission import Submission

__all__ = ["app"]

app = App(help="List jobs that accel launch --submit has started, show their output, and cancel them.")

Engine = Annotated[
    str | None,
    typer.Option(
        "--engine", help="Engine to ask; by default submit_config.engine of the configuration file."
    ),
]
Namespace = Annotated[str | None, typer.Option("--namespace", help="Kubernetes namespace.")]
Address = Annotated[
    str | None, typer.Option("--address", help="Address of the engine, as in --submit_address.")
]
ConfigFile = Annotated[str | None, typer.Option("--config_file", help="Configuration file to read.")]
Id = Annotated[str, typer.Argument(help="The job, as accel jobs ls lists it.")]


def _asked(
    engine: str | None, namespace: str | None, address: str | None, file: str | None
) -> tuple[str, Submission, SubmitSection]:
    """The engine's name, its submission, and the options with which it is asked.

    Raises:
        ConfigError: no engine is named, it does not exist, or it has no such option.
    """
    config = resolve(file, snapshot()).config
    about = config.submission if isinstance(config, LaunchConfig) else SubmitSection()
    name = engine or about.engine
    if name is None:
        raise ConfigError(
            f"no engine is named; pass --engine (one of {', '.join(SUBMISSIONS.names())}), or set submit_config.engine "
            "in the configuration file"
        )
    submission = SUBMISSIONS.get(name)
    for flag, value in (("namespace", namespace), ("address", address)):
        if value is not None and submission.uses is not None and flag not in submission.uses:
            raise ConfigError(
                f"--{flag} is {value!r}, and {submission.title} has no such option; leave it out"
            )
    about = dataclasses.replace(
        about, namespace=namespace or about.namespace, address=address or about.address
    )
    return name, submission, about


@app.command("ls")
def list_jobs(
    engine: Engine = None,
    namespace: Namespace = None,
    address: Address = None,
    config_file: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the jobs of an engine that accel launch --submit has started, the newest last."""
    name, submission, about = _asked(engine, namespace, address, config_file)
    found = submission.jobs(about, snapshot())
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(job) for job in found], indent=2))
    elif not found:
        typer.echo(f"accel launch has submitted no job that {submission.title} remembers ({name})")
    else:
        cells = ((job.id, job.name, job.state, job.machines, " ".join(job.why.split())) for job in found)
        rows = [[printable("-" if cell in (None, "") else cell) for cell in row] for row in cells]
        show_table(("job", "name", "state", "machines", "why"), rows, left=3, spare=("why",))


@app.command()
def logs(
    job: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    engine: Engine = None,
    namespace: Namespace = None,
    address: Address = None,
    config_file: ConfigFile = None,
) -> None:
    """Print the output of a job."""
    _, submission, about = _asked(engine, namespace, address, config_file)
    for line in submission.logs(job, about, snapshot(), follow=follow):
        line = line.rstrip("\n")
        typer.echo(printable(line, len(line)) if sys.stdout.isatty() else line)


@app.command()
def cancel(
    job: Id,
    engine: Engine = None,
    namespace: Namespace = None,
    address: Address = None,
    config_file: ConfigFile = None,
) -> None:
    """End a job. Its ranks get a signal first, so that they can save."""
    _, submission, about = _asked(engine, namespace, address, config_file)
    typer.echo(submission.cancel(job, about, snapshot()))
