"""Names that only clients of Accelerate use, and that this library has under other names or not at all."""
