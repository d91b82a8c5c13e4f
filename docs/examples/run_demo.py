"""The demo: train on two processes, stop, resume, finish, and check the saved weights in a fresh process.

Run with ``hatch run demo:run``. Exits with 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
STOP_AFTER, EPOCHS = 3, 8
LEAST_ACCURACY = 0.97
_SCORE = re.compile(r"(\d+) of (\d+) right")


def run(console: Console, title: str, command: list[str]) -> tuple[list[tuple[int, int]], float]:
    """Run a command, show its output, and return every score that it printed, and the seconds it took."""
    console.rule(title)
    shown = " ".join("python" if part == sys.executable else part for part in command)
    console.print(f"$ {shown}", style="dim", highlight=False, soft_wrap=True)
    begin = time.perf_counter()
    output: list[str] = []
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            console.out(line.rstrip(), highlight=False)
    if process.returncode:
        sys.exit(f"demo: {title} failed, exit status {process.returncode}")
    scores = [(int(match[1]), int(match[2])) for match in _SCORE.finditer("".join(output))]
    return scores, time.perf_counter() - begin


def main() -> None:
    """Run the three parts and close with a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_processes", type=int, default=2)
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="accel-demo-") as output:
        launch = ["accel", "launch", "--num_processes", str(arguments.num_processes), "--cpu", "digits.py"]
        launch += ["--output", output, "--epochs", str(EPOCHS)]
        first, first_seconds = run(
            console, f"train, stop after epoch {STOP_AFTER}", [*launch, "--stop_after", str(STOP_AFTER)]
        )
        second, second_seconds = run(console, "resume from the newest checkpoint", [*launch, "--resume"])
        weights = str(Path(output) / "model" / "model.safetensors")
        check = [sys.executable, "digits_check.py", weights]
        (alone,), check_seconds = run(console, "reload the weights in one fresh process", check)
    console.rule("result")
    report(console, [(first, first_seconds), (second, second_seconds), ([alone], check_seconds)])
    kept = {
        f"it resumed after epoch {STOP_AFTER}": (len(first), len(second))
        == (STOP_AFTER, EPOCHS - STOP_AFTER),
        "a fresh process finds exactly the same accuracy": second[-1] == alone,
        f"accuracy is at least {LEAST_ACCURACY:.0%}": alone[0] / alone[1] >= LEAST_ACCURACY,
    }
    for promise, holds in kept.items():
        console.print(f"[{'green' if holds else 'red'}]{'kept' if holds else 'BROKEN'}[/]  {promise}")
    sys.exit(0 if all(kept.values()) else 1)


def report(console: Console, parts: list[tuple[list[tuple[int, int]], float]]) -> None:
    """The closing table."""
    table = Table("part", "epochs", "held-out digits right", "accuracy", "seconds")
    rows = zip(("trained and stopped", "resumed and finished", "reloaded, one process"), parts, strict=True)
    epoch = 0
    for title, (scores, seconds) in rows:
        trained = title != "reloaded, one process"
        epochs = f"{epoch + 1}-{epoch + len(scores)}" if trained else ""
        epoch += len(scores)
        right, total = scores[-1]
        table.add_row(title, epochs, f"{right} of {total}", f"{right / total:.2%}", f"{seconds:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
