"""Objects that a training loop uses at each step."""
