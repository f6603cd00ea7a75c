"""The module of the entry point ``td``. It is empty, because td-nn does not register methods or kinds."""
