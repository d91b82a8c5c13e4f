"""What a rank lets its launcher know: its progress, its stack, and the collectives that it waits in."""
