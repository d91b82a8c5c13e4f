"""Loading checkpoints: weights into models, and training states."""
