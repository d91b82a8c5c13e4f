"""The checks of ``accel test`` in the configured world."""
