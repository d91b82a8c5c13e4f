"""Pictures of the concept pages: one module for each, with ``TITLE`` and ``draw(facts)``."""
