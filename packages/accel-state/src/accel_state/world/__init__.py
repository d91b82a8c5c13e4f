"""The world of this run: its processes, this one's place in it, and how clusters tell it."""
