"""Checkpoints that other programs wrote, or are to read: Accelerate's, and torch's distributed ones."""
