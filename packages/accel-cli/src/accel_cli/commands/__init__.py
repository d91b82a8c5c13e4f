"""One module per command; each has ``main(arguments) -> int``."""
