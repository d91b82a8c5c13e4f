"""What the acceptance runs; each function is named in `gpu.registry`."""
