"""What ``accel test`` checks in the configured world."""
