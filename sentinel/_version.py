"""The version of the package, of which pyproject.toml reads it too."""

__version__ = "0.1.0"
