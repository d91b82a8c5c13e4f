"""From arguments to a plan, and from users' objects to prepared ones."""
