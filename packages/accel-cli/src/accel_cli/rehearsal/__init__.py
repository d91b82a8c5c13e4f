"""``accel rehearse``: one simulated rank of a larger run, and what would fail on it."""
