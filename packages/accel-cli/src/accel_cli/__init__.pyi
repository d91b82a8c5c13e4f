# The public names of this package, one a line; the package reads them from here, and so do type checkers.
from accel_cli.__about__ import __version__ as __version__

__all__: list[str]
