"""The former module of :mod:`td_store.arrays`, to whose names pickles of opened saves refer."""

from ._python.public_names import lazy_names

__getattr__ = lazy_names(
    __name__, {"td_store.arrays": ["KeptSource", "MappedSource", "MappedTensor", "RefusedValues"]}
)[0]
