"""How much memory a model needs, from its shapes alone."""
