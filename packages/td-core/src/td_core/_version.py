"""The version of all packages; their build files read it from this module."""

__version__ = "0.1.0"
