"""What a running rank does: its output, its progress, its stack, and the reports that its launcher makes of them."""
