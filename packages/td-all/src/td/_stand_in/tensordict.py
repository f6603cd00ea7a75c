"""Module that ``import tensordict`` loads in programs run with ``python -m td run``, and in their child processes."""

from __future__ import annotations

import sys

from td import install_as_tensordict

if __name__ == "tensordict":
    del sys.modules[
        __name__
    ]  # an import returns the entry of sys.modules, which the next line sets to the alias
    install_as_tensordict()
