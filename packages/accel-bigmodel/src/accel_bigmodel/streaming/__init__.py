"""Bring weights to the device just in time: groups of them, moved ahead of the modules that use them."""
