"""Collectives on nested structures, and the channels, serialization and watchdog below them."""
