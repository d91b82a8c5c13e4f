"""Where the packages of this library come from: what messages say to install or upgrade one."""

__all__ = ["INSTALL"]

INSTALL = "pip install -r requirements/all.txt, in a clone of the repository"
"""Their names are on no package index yet, and anybody could register them: a message gives none to an installer."""
