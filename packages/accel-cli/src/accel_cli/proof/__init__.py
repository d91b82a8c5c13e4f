"""``accel prove``: the first steps of a script on ranks, compared with those of one process."""
