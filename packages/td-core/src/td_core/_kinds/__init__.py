"""The classes of nodes, one file or prefix for each, and their registration."""
