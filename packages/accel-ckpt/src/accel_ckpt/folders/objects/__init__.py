"""Checkpoints in object storage, by fsspec; see ``docs/architecture.md``."""
