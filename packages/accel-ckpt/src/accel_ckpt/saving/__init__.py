"""Writing checkpoints: planned, staged, written, committed."""
