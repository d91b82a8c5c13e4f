"""Sequences divided among ranks: context parallelism, sequence parallelism (Ulysses), and both together."""
