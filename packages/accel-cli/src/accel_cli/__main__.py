"""``accel``, also as ``python -m accel_cli``."""

import sys
from typing import Any

from accel_state.environment import snapshot

__all__ = ["main"]


def main() -> int:
    """Run ``accel``, or answer a shell that asks how a command line can go on."""
    environ = snapshot()
    if "_ACCEL_COMPLETE" in environ:
        from accel_cli.completion import answer

        code = answer(environ, _application)
        if code is not None:
            return code
    from accel_cli.app import main as run

    return run()


def _application() -> Any:
    import typer

    from accel_cli.app import app

    return typer.main.get_command(app)


if __name__ == "__main__":
    sys.exit(main())
