"""Collectives on nested structures, and what carries them."""
