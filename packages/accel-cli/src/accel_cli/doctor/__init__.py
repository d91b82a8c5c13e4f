"""What ``accel doctor`` checks on this machine."""
