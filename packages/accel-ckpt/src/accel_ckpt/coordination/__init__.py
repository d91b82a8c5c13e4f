"""Who takes part in a save or load, and how ranks agree: all, the main process alone, in the background."""
