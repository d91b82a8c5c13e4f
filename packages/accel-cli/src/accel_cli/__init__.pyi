# Generated from __init__.py by tools/gen_stubs.py; do not edit.
from accel_cli.__about__ import __version__ as __version__

__all__: list[str]
