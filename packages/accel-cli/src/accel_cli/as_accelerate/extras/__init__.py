"""Names that only clients of Accelerate use, and that this library has under other names or not at all.

Those that the package ``accelerate`` offers are listed in its stubs, and not again in ``__all__`` of each module.
"""
