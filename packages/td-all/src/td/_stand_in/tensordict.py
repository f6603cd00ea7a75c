"""What ``import tensordict`` finds in a program that ``python -m td run`` started, and in its child processes."""

from __future__ import annotations

import sys

from td import install_as_tensordict

if __name__ == "tensordict":
    del sys.modules[__name__]  # the alias takes the place; an import returns what stands there
    install_as_tensordict()
