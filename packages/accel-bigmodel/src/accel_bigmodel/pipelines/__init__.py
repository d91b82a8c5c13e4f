"""Pipeline inference: a model split into stages, one per process."""
