"""``python -m accel_cli`` is ``accel``."""

import sys

from accel_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
