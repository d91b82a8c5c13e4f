"""Losses of language models that never hold the logits of all tokens."""
