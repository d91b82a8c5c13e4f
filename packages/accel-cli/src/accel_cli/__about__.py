"""The version of this distribution; it is defined only here."""

__version__ = "0.1.0"
