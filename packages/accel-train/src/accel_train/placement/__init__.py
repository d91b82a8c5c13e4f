"""The placement axis: a null-object base, one class per file, and a registry."""
