"""Runs of this library that record what a concept page shows: one module for each picture, with ``record()``."""
