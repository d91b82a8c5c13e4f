"""The state of a training: optimizers, their states, and `Checkpointer`, which saves and loads all of it."""
