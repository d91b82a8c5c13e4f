"""Pipeline inference: a model cut into stages, one per process."""
