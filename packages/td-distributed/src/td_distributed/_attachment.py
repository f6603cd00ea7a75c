"""Old import path of ``rebuild``: pickles of earlier releases refer to it."""

from ._consolidated_backend import rebuild

__all__ = ["rebuild"]
