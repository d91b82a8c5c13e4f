"""The package ``accelerate`` as accel answers it; its names are in the stub beside this file."""

from accel_cli.as_accelerate import LEVEL as _LEVEL
from accel_cli.as_accelerate.names import announce as _announce
from accel_cli.as_accelerate.names import answer as _answer
from accel_cli.as_accelerate.names import find_stubs as _find_stubs

__version__ = _LEVEL
_find_stubs()
__getattr__, __dir__, __all__ = _answer(__name__, f"{__file__}i")
__all__ = [*__all__, "__version__"]
_announce()
