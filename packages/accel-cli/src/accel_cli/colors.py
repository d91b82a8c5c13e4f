"""Colours of plain text; see ``accel_state.host.colors``."""

from accel_state.host.colors import Colors, colors_for

__all__ = ["Colors", "colors_for"]
