"""The PACT paper's tables, made again with this package's backends: one command per table (``accuracy.py`` and its siblings)."""
