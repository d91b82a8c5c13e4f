"""What a rank reports to its launcher: its progress, its stack, and the collectives that it waits in."""
