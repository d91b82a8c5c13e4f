"""What the files of a checkpoint hold, and how they are found and read."""
