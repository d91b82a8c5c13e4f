from accel_train.__about__ import __version__ as __version__

__all__: list[str]
