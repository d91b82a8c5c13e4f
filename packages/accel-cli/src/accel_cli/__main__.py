"""``accel``, also as ``python -m accel_cli``."""

import os
import signal
import sys

from accel_state.environment import snapshot

__all__ = ["main"]


def main() -> int:
    """Run ``accel``, or answer a shell that asks how a command line can go on."""
    try:
        code = _answered()
    except KeyboardInterrupt:  # while modules are imported; a running command is ended by accel_cli.app
        code = 128 + signal.SIGINT
    if code == 128 + signal.SIGINT and sys.platform != "win32":
        # A shell that waits for a program ends its loop only if Ctrl-C has ended the program, whatever code it returns.
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def _answered() -> int:
    environ = snapshot()
    if "_ACCEL_COMPLETE" in environ:
        from accel_cli.completion import answer

        return answer(environ)
    from accel_cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
