"""Drawings of the documentation, written as SVG by ``python tools/draw.py``: plots of measurements, and diagrams."""
