"""Nulls: what becomes of missing numbers, lists and values, by the policy of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from td_core import NestedKey
from td_core.errors import KeyPathError

#: The policies of ``nulls=``. A number stands for missing numbers.
POLICIES = ("auto", "raise", "fill", "mask")

Path = tuple[str, ...]
#: One of :data:`POLICIES`, or a number.
Policy = str | float
Bools = npt.NDArray[np.bool_]
ChoiceT = TypeVar("ChoiceT")


def show_column(path: Path) -> str:
    """Return the path of a column for a message."""
    return repr(path[0] if len(path) == 1 else path)


def list_choices(choices: ChoiceT | Mapping[NestedKey | None, ChoiceT]) -> dict[Path | None, ChoiceT]:
    """Return an option that has one choice, or one for each key, by key path; that of the other keys is under None."""
    items: Mapping[NestedKey | None, ChoiceT] = choices if isinstance(choices, Mapping) else {None: choices}
    return {(key,) if isinstance(key, str) else key: choice for key, choice in items.items()}


def find_choice(choices: Mapping[Path | None, ChoiceT], path: Path) -> ChoiceT:
    """Return the choice of a key path: its own, that of the level above, or the default."""
    levels = (path[:length] for length in range(len(path), 0, -1)) if len(choices) > 1 else ()
    return choices[next((level for level in levels if level in choices), None)]


@dataclass(slots=True)
class Nulls:
    """The policy of a read, and the masks that it makes.

    Attributes:
        policies: the policy of each key path; that of the other ones under None.
        masks: by key path, True where a number or value is present.
    """

    policies: dict[Path | None, Policy]
    masks: dict[Path, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, nulls: Any, default: str = "auto") -> Nulls:
        """Return the policy that an argument describes; raise ValueError or TypeError for an unknown one."""
        if isinstance(nulls, Nulls):
            return nulls
        found: dict[Path | None, Policy] = list_choices(nulls)
        for policy in found.values():
            if isinstance(policy, str):
                if policy not in POLICIES:
                    raise ValueError(
                        f"nulls is one of {', '.join(map(repr, POLICIES))} or a number, or a mapping of keys to these; "
                        f"got {policy!r}"
                    )
            elif not isinstance(policy, Number):
                raise TypeError(f"nulls is a string, a number or a mapping; got {policy!r:.100}")
        return cls({None: default, **found})

    def check_keys(self, known: Iterable[Path], where: str) -> None:
        """Raise KeyPathError if there is a policy for a key that is none of the known paths, and no level of them."""
        if len(self.policies) > 1:
            found = {path[:length] for path in known for length in range(1, len(path) + 1)}
            if unknown := [key for key in self.policies if key is not None and key not in found]:
                raise KeyPathError(
                    f"{where}: nulls has {', '.join(map(show_column, unknown))}, and there is no such column"
                )

    def get(self, path: Path) -> Policy:
        """Return the policy of a key path."""
        return find_choice(self.policies, path)

    def check(self, path: Path, valid: Bools, *, always: bool = False) -> Policy:
        """Return the policy of a column with nulls; raise ValueError if it is ``"raise"``, or ``always`` except a fill."""
        policy = self.get(path)
        if policy == "raise" or (policy == "auto" and always):
            missing = ~np.asarray(valid)
            rows = missing.reshape(len(missing), -1)
            raise ValueError(
                f"column {show_column(path)}: {int(missing.sum())} of {missing.size} values are null, the first in row "
                f'{int(rows.any(1).argmax())}: pass nulls="fill", nulls="mask", or a number for this key'
            )
        return policy

    def fill(self, path: Path, leaf: Tensor, valid: Bools) -> Tensor:
        """Return a leaf with numbers in place of nulls; ``valid`` is a bool array of the rows, or of the leaf's shape."""
        policy = self.check(path, valid, always=not (leaf.is_floating_point() or leaf.is_complex()))
        number = policy
        if isinstance(policy, str):
            number = float("nan") if leaf.is_floating_point() or leaf.is_complex() else 0
        mask = torch.from_numpy(np.ascontiguousarray(valid))
        if policy == "mask":
            self.masks[path] = mask
        missing = (~mask).view(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        filler = torch.tensor(number)
        fits = torch.can_cast(filler.dtype, leaf.dtype) or (leaf.dtype == torch.bool and number in (0, 1))
        if not isinstance(policy, str) and not fits:
            raise TypeError(f"column {show_column(path)} has the dtype {leaf.dtype}; nulls are {policy!r}")
        return torch.where(missing, filler.to(leaf.dtype), leaf)

    def keep(self, path: Path, values: list[Any], *, own: bool = False) -> list[Any]:
        """Return the values of rows, None for nulls; raise ValueError if the policy is ``"raise"``, unless they are ``own``."""
        valid = np.array([value is not None for value in values], bool)
        if valid.all():
            return values
        if (self.get(path) if own else self.check(path, valid)) == "mask":
            self.masks[path] = torch.from_numpy(valid)
        return values
