"""The configuration schema of a run, shared by files, environment variables, flags and code."""

from accel_state._lazy import attach

_of_stub, __dir__, __all__ = attach(__name__)


def __getattr__(name: str) -> object:
    """A name of the stub, or the class of the section of an installed strategy."""
    if name.endswith("Section") and name not in __all__:
        from accel_state.config.strategies import installed_strategies

        for strategy in installed_strategies():
            if strategy.section.__name__ == name:
                return strategy.section
    return _of_stub(name)
