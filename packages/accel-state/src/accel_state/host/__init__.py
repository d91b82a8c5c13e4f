"""This machine: devices, memory, signals, installed packages."""
