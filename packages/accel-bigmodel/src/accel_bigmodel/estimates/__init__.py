"""Memory estimates of models, from their shapes alone."""
