"""The plugin registry: the hooks, the manager that calls them, and the methods of the siblings."""
