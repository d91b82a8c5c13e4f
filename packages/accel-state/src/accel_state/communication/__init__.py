"""What collectives are made of: channels, serialization, the store, and the watchdog."""
