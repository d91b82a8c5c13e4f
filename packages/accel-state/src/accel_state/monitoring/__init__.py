"""Reports of a rank to its launcher: its progress, its stack, and the collectives that it waits in."""
