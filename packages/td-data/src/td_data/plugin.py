"""The module of the entry point ``td``. It is empty, because td-data does not register methods or kinds."""
