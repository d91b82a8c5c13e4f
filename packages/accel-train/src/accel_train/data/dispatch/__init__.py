"""Rank 0 reads for all: cutting a round into parts, and sending them."""
