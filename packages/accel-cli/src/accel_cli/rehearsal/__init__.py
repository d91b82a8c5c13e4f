"""``accel rehearse``: one rank of a world that is not there, and what would fail on it."""
