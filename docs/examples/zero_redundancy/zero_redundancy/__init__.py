"""ZeRO-1: each rank has the whole model, and the optimizer's states of a part of its parameters."""
