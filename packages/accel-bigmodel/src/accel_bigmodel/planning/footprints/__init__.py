"""How much memory each strategy takes: one class per strategy, found by the name of the strategy."""
