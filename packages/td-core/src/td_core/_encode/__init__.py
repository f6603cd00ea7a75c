"""Nodes as tables, values as JSON, pickles, and what is said of a save."""
