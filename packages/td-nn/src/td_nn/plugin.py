"""What td-core finds under the entry point ``td``: that the package is there. Modules add nothing to collections."""
