"""The precision fp8: products of linear layers in 8-bit floating point, computed by torchao or TransformerEngine."""
