"""What a training loop uses at each step."""
