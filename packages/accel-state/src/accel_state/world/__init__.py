"""The process group of a run, and this process in it."""
