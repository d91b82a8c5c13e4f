"""States of training in host memory: copies of device memory, and tensors that refuse to be used meanwhile."""
