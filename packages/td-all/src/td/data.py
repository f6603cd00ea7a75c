"""``td_data`` as a module of td, for ``from td.data import Loader``."""

import sys
from typing import TYPE_CHECKING

import td_data

if TYPE_CHECKING:
    from td_data import *  # noqa: F403

sys.modules[__name__] = td_data
