"""What ``accel doctor`` checks on this machine, and in a small world of ranks."""
