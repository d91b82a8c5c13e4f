"""The checks of ``accel doctor`` on this machine, and in a small world of ranks."""
