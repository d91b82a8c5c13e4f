"""The questions of ``accel config``."""
