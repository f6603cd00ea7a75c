"""Module that ``import tensordict`` loads in programs run with ``python -m td run``, and in their child processes."""

from __future__ import annotations

import sys

from td import install_as_tensordict

if __name__ == "tensordict":
    # An import returns the entry of sys.modules, which install_as_tensordict() sets to the alias.
    del sys.modules[__name__]
    install_as_tensordict()
