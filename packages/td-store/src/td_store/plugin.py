"""The module of the entry point ``td``. It is empty, because td-store does not register methods or kinds."""
