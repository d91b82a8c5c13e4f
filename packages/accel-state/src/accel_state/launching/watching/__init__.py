"""Watching ranks: their output, progress and stacks, and the reports about them."""
