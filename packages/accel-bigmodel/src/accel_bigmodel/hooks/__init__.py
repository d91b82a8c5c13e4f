"""Removable hooks around the ``forward`` of any module, under the attribute names that other libraries read."""
