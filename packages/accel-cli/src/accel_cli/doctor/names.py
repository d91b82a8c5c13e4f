"""Words that ranks and the judgement share; without torch."""

__all__ = ["NOT_IN_BACKEND"]

NOT_IN_BACKEND = "the backend has none"
"""The problem of a collective that the backend lacks; it is no failure."""
