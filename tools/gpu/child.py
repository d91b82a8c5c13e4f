"""The process of one check: calls it, and writes each figure to a file as soon as it is known."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpu.figures import Figure, NotRunError, Run


def is_own(module: str) -> bool:
    """Whether a module is of this repository, so that its absence is a fault and not a missing requirement."""
    return module.partition(".")[0].startswith(("accel_", "gpu", "testkit"))


def run(target: str, arguments: tuple[str, ...], run: Run, answer: Path) -> int:
    """Call a check.

    Args:
        target: `module:function`.
        arguments: of the function, after the `Run`.
        run: where and how large.
        answer: the file. A line of JSON per figure; then one that says how it ended: `{"end": "done"}`, `"not run"` or
            `"failed"` with a `"reason"`. None of these means that the process was killed.

    Returns:
        The exit code.
    """
    with open(answer, "w", encoding="utf-8") as file:

        def say(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            module, _, name = target.partition(":")
            check: Callable[..., Iterable[Figure]] = getattr(importlib.import_module(module), name)
            for figure in check(run, *arguments):
                say(dataclasses.asdict(figure))
        except NotRunError as error:
            say({"end": "not run", "reason": str(error)})
        except ModuleNotFoundError as error:
            traceback.print_exc(file=sys.stderr)
            own = is_own(error.name or "")
            say({"end": "failed" if own else "not run", "reason": str(error)})
            return int(own)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            first = (str(error).strip() or "no message").splitlines()[0]
            say({"end": "failed", "reason": f"{type(error).__name__}: {first}"})
            return 1
        else:
            say({"end": "done"})
    return 0
