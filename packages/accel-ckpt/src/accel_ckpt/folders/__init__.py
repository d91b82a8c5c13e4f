"""Where checkpoints lie: folders of a file system or object storage, behind one interface."""
