"""Fully sharded data parallelism on `torch.distributed.fsdp.fully_shard`."""
