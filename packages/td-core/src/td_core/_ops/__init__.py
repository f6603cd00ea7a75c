"""The public behaviour of collections, in stateless mixins that see only the core of :mod:`td_core._collection`."""
