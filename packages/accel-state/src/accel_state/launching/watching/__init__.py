"""What a launcher sees of its ranks: output, progress and stacks, and the reports it makes of them."""
