"""``td_remote`` as a module of td, for ``from td.remote import Remote``."""

import sys
from typing import TYPE_CHECKING

import td_remote

if TYPE_CHECKING:
    from td_remote import *  # noqa: F403

sys.modules[__name__] = td_remote
