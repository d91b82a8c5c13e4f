"""``accel rehearse``: one simulated rank of a larger run, and the errors that it would meet."""
