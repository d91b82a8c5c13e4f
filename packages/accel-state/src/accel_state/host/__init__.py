"""Facts about this machine: devices, memory, what is installed."""
