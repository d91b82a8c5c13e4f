"""Models with quantised weights: configuration, supported devices, engines, and loading."""
