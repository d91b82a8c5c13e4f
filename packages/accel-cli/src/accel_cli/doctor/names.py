"""Constants that ranks and the verdict share; loads no torch."""

__all__ = ["NOT_IN_BACKEND"]

NOT_IN_BACKEND = "the backend has none"
"""The problem of a collective that the backend lacks; it is no failure."""
