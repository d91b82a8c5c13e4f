"""Rewriting of sources and configuration files for this library; ``accel migrate`` is its command."""
