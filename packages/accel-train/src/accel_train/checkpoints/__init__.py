"""Saving and loading on behalf of an `Accelerator`."""
