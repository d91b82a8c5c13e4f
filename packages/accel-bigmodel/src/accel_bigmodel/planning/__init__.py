"""Which strategy fits, and what each rank then holds: computed from sizes, without real tensors."""
