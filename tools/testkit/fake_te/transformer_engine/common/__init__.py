"""See `transformer_engine`."""
