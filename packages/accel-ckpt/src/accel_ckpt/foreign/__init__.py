"""Readers of files that other programs wrote: torch's distributed checkpoints, DeepSpeed's, pickles."""
