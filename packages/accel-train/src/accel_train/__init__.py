"""Put five lines into a PyTorch loop and run it on anything."""

from accel_state._lazy import attach
from accel_train.__about__ import __version__ as __version__

__getattr__, __dir__, __all__ = attach(
    __name__,
    {},
)
