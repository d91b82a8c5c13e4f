"""Experiment trackers: what an `Accelerator` logs to."""
