"""The parts of collectives: channels, serialization, the store, and the watchdog."""
