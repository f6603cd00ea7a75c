"""Mixins with the public methods of collections. They have no state and use only :mod:`td_core._collection`."""
