"""How much memory a launcher's own process holds while its ranks run.

hatch run bench:memory
"""

import sys

from cli import main

if __name__ == "__main__":
    sys.exit(main(times=False))
