"""Conversions: merging shards, and states that Accelerate wrote or is to read."""
