"""Memory footprints of strategies: one class per strategy, found by the strategy's name."""
