"""Collectives on nested structures: gather, reduce, broadcast, scatter."""
