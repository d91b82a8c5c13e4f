"""Where checkpoints lie: local folders and object storage, the commit of a new one, and numbered ones."""
