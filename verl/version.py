"""The version of verl."""

__version__ = "0.1.0"
