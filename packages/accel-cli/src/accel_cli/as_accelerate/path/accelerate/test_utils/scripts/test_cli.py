"""A script of ``accelerate.test_utils.scripts``, which programs also start by its path."""

from accel_cli.as_accelerate.extras.checks import say_where as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
