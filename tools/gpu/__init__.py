"""Acceptance of what needs an accelerator: `python tools/gpu/acceptance.py`."""
