"""What more than one package needs of module trees: tied names, sizes, single tensors, buffers."""
