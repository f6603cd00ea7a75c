"""Functions over collections, one concept a module."""
