"""Functions on collections, one concept per module."""
