"""The plugin registry: the hooks, the manager that calls them, and the declared methods of siblings."""
