"""A rank of ``ray_launcher``: calls the function that the notebook has sent to this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

__all__: list[str] = []

if __name__ == "__main__":
    # The file was written by the actor of this machine, with what `ray_launcher` gave to it.
    function, arguments = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
    function(*arguments)
