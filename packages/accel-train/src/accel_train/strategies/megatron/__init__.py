"""Megatron-core: tensor and pipeline parallelism, with an engine that owns its micro-batches."""
