"""``python -m accel_cli`` runs ``accel``."""

import sys

from accel_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
