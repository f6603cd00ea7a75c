"""The old path of a function that pickles of earlier releases name."""

from ._consolidated_backend import rebuild

__all__ = ["rebuild"]
