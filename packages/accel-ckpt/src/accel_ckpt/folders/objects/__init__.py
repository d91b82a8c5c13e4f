"""Checkpoints in object storage, by fsspec; the layout is in ``docs/format.md``."""
