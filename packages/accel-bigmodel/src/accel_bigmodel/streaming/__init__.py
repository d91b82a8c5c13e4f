"""Streaming: weights in host memory are copied to the device in groups, ahead of the modules that use them."""
