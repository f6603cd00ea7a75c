"""TensorDictSequential: a sequence of modules that read and write one collection."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from torch import nn

from td_core import TensorCollection, TensorDict
from td_core.spi import RULES
from td_core.typing import NestedKey

from ._data_flow import FlowReport, check_flow, draw_flow, show_flow
from ._dispatch import dispatch
from ._module import Inplace, TensorDictModule
from ._module_base import TensorDictModuleBase, show_module
from ._module_keys import SINK, Key, as_keys, has_key, is_provided, is_related, store_outputs
from ._switches import STATE, has_outputs
from ._wrap import WrapModule
from .module_errors import MissingKeyError, OutputError, SelectionError, note_place, show_step, step_out

if TYPE_CHECKING:
    from typing_extensions import Self

#: A member of a sequence, a list of members, or a dict from names to members.
Members = Union[Callable[..., object], Sequence[Callable[..., object]], Mapping[str, Callable[..., object]]]  # noqa: UP007


class TensorDictSequential(TensorDictModule):
    """Modules that run in order; each gets the collection that the previous one returned.

    ``in_keys`` are the keys that members read and that no earlier member writes, ``out_keys`` all keys that members write.
    A member that writes ``"n"`` provides ``("n", "a")``, too. A member that reads ``"n"`` needs ``"n"`` itself: keys below
    it do not suffice.

    Args:
        *modules: the members; or one list of them; or one dict from names to members. A callable without keys is a
            function of the collection.
        partial_tolerant: True skips members whose inputs are missing, instead of raising an error. On a lazy stack, such
            a member runs on the members of the stack that have the inputs.
        selected_out_keys: the output keys to keep, see :meth:`select_out_keys`.
        inplace: None returns the result of the last member; True the input, updated with the outputs; False a new
            TensorDict with the outputs only; ``"empty"`` the same with the kind, batch size and device of the input.

    Raises:
        TypeError: a member cannot be called, or has keys but is not an ``nn.Module``.
        SelectionError: no member writes a selected key.

    >>> seq = TensorDictSequential({
    ...     "enc": TensorDictModule(torch.nn.Linear(3, 4), ["x"], ["hidden"]),
    ...     "dec": TensorDictModule(torch.nn.Linear(4, 2), ["hidden"], ["y"]),
    ... })
    >>> seq.in_keys, seq.out_keys, seq(torch.ones(3))[1].shape
    (['x'], ['hidden', 'y'], torch.Size([2]))
    >>> print(seq)
    TensorDictSequential: x -> hidden, y
    member   module                    reads   writes
    ["enc"]  TensorDictModule(Linear)  x       hidden
    ["dec"]  TensorDictModule(Linear)  hidden  y
    """

    module: Any
    partial_tolerant: bool = False

    def __init__(
        self,
        *modules: Members,
        partial_tolerant: bool = False,
        selected_out_keys: Sequence[NestedKey] | None = None,
        inplace: Inplace = None,
    ) -> None:
        container = _contain(_pairs(modules))
        in_keys, out_keys = self._compute_in_and_out_keys(_members(container))
        super().__init__(container, in_keys, out_keys, inplace=inplace)
        self.partial_tolerant = partial_tolerant
        if selected_out_keys is not None:
            self.select_out_keys(*as_keys(selected_out_keys, "selected_out_keys", known=out_keys))

    @staticmethod
    def _compute_in_and_out_keys(modules: Iterable[Any]) -> tuple[list[Key], list[Key]]:
        """Return the keys that modules read and no earlier one writes, and all keys that they write."""
        in_keys: list[Key] = []
        out_keys: dict[Key, None] = {}
        for module in modules:
            for key in module.in_keys:
                if key not in in_keys and not is_provided(key, out_keys):
                    in_keys.append(key)
            for key in module.out_keys:
                out_keys.pop(key, None)
                out_keys[key] = None
        return in_keys, list(out_keys)

    def _take_keys(self, name: str) -> None:
        # An assignment selects among the outputs of the members, but not that of the constructor, before there are members.
        if name == "out_keys" and "module" in self._modules and not RULES.follows_tensordict:
            self.__dict__["_selected_out_keys"] = self._all_out_keys

    def _filter_results(self, does: bool) -> None:
        """Register no hook: ``forward`` removes unselected outputs, and keeps entries of the input."""

    @dispatch(auto_batch_size=False)
    def forward(  # type: ignore[override]
        self, tensordict: TensorCollection, tensordict_out: TensorCollection | None = None, **kwargs: Any
    ) -> TensorCollection:
        """Run the members and return the collection that has their outputs.

        Args:
            tensordict: collection with the inputs.
            tensordict_out: collection that receives the outputs, whatever ``inplace`` is; the input does not change then.
            **kwargs: must be empty.
        """
        if kwargs:
            raise RuntimeError(
                f"{type(self).__name__} takes its inputs {self.in_keys} by keyword, and tensordict_out; got {list(kwargs)}"
            )
        return self._store_results(tensordict, tensordict_out, self._run)

    def _store_results(
        self,
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None,
        run: Callable[[TensorCollection], TensorCollection],
    ) -> TensorCollection:
        """Run the members with a function, and store their outputs according to ``inplace`` and the selection."""
        selected = self._selected_out_keys
        kept: Sequence[Key] = self._all_out_keys if selected is None else selected
        if STATE.skip_existing is not False and has_outputs(
            STATE.skip_existing, tensordict, self._all_in_keys, kept
        ):
            return tensordict
        inplace = self.inplace
        if tensordict_out is None and selected is None and inplace in (None, True):
            result = run(tensordict)
            if inplace is None or result is tensordict:
                return result
        else:
            result = run(tensordict.copy())
        present = result.keys(True)
        if tensordict_out is None:
            if inplace is None:
                kept = [*kept, *_list_overwritten(tensordict, result, kept)]
            tensordict_out = (
                tensordict.empty() if inplace == "empty" else TensorDict() if inplace is False else tensordict
            )
        written = [key for key in kept if key != SINK and key in present]
        store_outputs(tensordict_out, written, map(result.get, written))
        return tensordict_out

    def _run(self, tensordict: TensorCollection) -> TensorCollection:
        """Run the members in order and return the result of the last one."""
        if self.partial_tolerant:
            return self._run_runnable(tensordict)
        place = 0
        try:
            for module in self._modules["module"]._modules.values():  # type: ignore[union-attr]
                if tensordict is None:
                    raise OutputError(
                        f"the member before {show_module(module)} returned None, not a collection"
                    )
                tensordict = module(tensordict)  # type: ignore[misc]
                place += 1
        except Exception as error:
            self._locate(error, place)
            raise
        return tensordict

    def _run_runnable(self, tensordict: TensorCollection) -> TensorCollection:
        """Run the members that have their inputs, skip the others, and return the last result."""
        for place, module in enumerate(self):
            try:
                if has_keys(tensordict, module.in_keys):
                    tensordict = module(tensordict)
                else:
                    run_on_members(module, tensordict)
            except Exception as error:
                self._locate(error, place)
                raise
        return tensordict

    def _locate(self, error: Exception, place: int) -> None:
        """Add the member to an error, and for a missing key the later members that write it."""
        names, members = self._names(), list(self)
        member = members[place]
        text = f"{show_module(member)}, which reads {list(member.in_keys)} and writes {list(member.out_keys)}"
        note_place(error, text)
        step_out(error, show_step(names[place]))
        if isinstance(error, MissingKeyError) and not error.writers:
            later = list(zip(names, members))[place + 1 :]
            error.writers = [
                (key, (show_step(name),))
                for key in error.missing
                for name, module in later
                if is_provided(key, module.out_keys)
            ]

    def _explain_missing(self, key: Key, result: TensorCollection) -> str:
        """Format which skipped members write a key, and which inputs they lack."""
        said = ""
        for name, module in zip(self._names(), self):
            absent = [item for item in module.in_keys if not has_key(result, item)]
            if absent and is_provided(key, module.out_keys):
                lacks = ", ".join(map(repr, absent))
                said += f"; seq{show_step(name)} writes it, and was skipped because there is no {lacks}"
        return said

    def _names(self) -> list[str] | list[int]:
        """Return the name or index of each member."""
        return list(self.module) if self._is_named else list(range(len(self)))

    @property
    def _is_named(self) -> bool:
        return isinstance(self.module, nn.ModuleDict)

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        modules: Any = self._modules  # self.module is found by __getattr__, which is slow
        return iter(_members(modules["module"]))

    def __getitem__(self, index: int | str | slice) -> Any:
        """Return a member by index or name, or a sequence of the members in a slice."""
        if isinstance(index, str):
            if not self._is_named:
                raise TypeError(
                    f"the members of this {type(self).__name__} have no names; got the index {index!r}"
                )
            return self.module[index]
        pairs = self._pairs()
        if isinstance(index, slice):
            return self._with(pairs[index])
        return pairs[self._place(index)][1]

    def __setitem__(self, index: int | str | slice, module: Callable[..., object]) -> None:
        """Replace a member, or append one under a new name."""
        if isinstance(index, slice):
            raise TypeError("members are replaced one by one: a slice stands on the right of = only")
        pairs = self._pairs()
        if isinstance(index, str) and self._is_named and index not in self.module:
            pairs.append((index, module))
        else:
            place = self._place(index)
            pairs[place] = (pairs[place][0], module)
        self._replace(pairs)

    def __delitem__(self, index: int | str | slice) -> None:
        """Remove a member or a slice of them."""
        pairs = self._pairs()
        del pairs[index if isinstance(index, slice) else self._place(index)]
        self._replace(pairs)

    def append(self, module: Callable[..., object], name: str | None = None) -> Self:
        """Add a member at the end.

        Args:
            module: the member.
            name: its name, required if the members of the sequence have names.

        >>> seq = TensorDictSequential(TensorDictModule(abs, ["x"], ["y"]))
        >>> seq.append(TensorDictModule(abs, ["y"], ["z"])).out_keys
        ['y', 'z']
        """
        return self.insert(len(self), module, name)

    def insert(self, index: int, module: Callable[..., object], name: str | None = None) -> Self:
        """Insert a member at an index.

        Args:
            index: the position of the new member.
            module: the member.
            name: its name, required if the members of the sequence have names.

        >>> seq = TensorDictSequential(TensorDictModule(abs, ["y"], ["z"]))
        >>> seq.insert(0, TensorDictModule(abs, ["x"], ["y"])).in_keys
        ['x']
        """
        if self._is_named != (name is not None):
            raise TypeError(
                f"the members of this {type(self).__name__} have {'names: give name=' if self._is_named else 'no names'}"
            )
        pairs = self._pairs()
        if name is not None and name in self.module:
            raise ValueError(f"there is a member {name!r} already; seq[{name!r}] = module replaces it")
        pairs.insert(index, (name, module))
        self._replace(pairs)
        return self

    def extend(self, modules: Iterable[Callable[..., object]] | Mapping[str, Callable[..., object]]) -> Self:
        """Add members at the end.

        Args:
            modules: a list of members; a dict from names to members if those of the sequence have names.

        >>> len(TensorDictSequential().extend([lambda td: td, lambda td: td + 1]))
        2
        """
        pairs = _pairs((modules if isinstance(modules, (Mapping, nn.ModuleDict)) else list(modules),))
        if pairs and self._is_named != (pairs[0][0] is not None):
            raise TypeError(
                f"the members of this {type(self).__name__} have {'names: give a dict' if self._is_named else 'no names'}"
            )
        self._replace(self._pairs() + pairs)
        return self

    def pop(self, index: int | str = -1) -> Any:
        """Remove a member by index or name and return it.

        >>> seq = TensorDictSequential({"a": TensorDictModule(abs, ["x"], ["y"])})
        >>> seq.pop("a").out_keys
        ['y']
        """
        pairs = self._pairs()
        member = pairs.pop(self._place(index))[1]
        self._replace(pairs)
        return member

    def __getattr__(self, name: str) -> Any:
        if name in ("clear", "update"):  # methods of the container that would not update the keys
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; use `del seq[:]`, `seq[name] = module` or extend()"
            )
        return super().__getattr__(name)

    def _pairs(self) -> list[tuple[str | None, Any]]:
        """Return a pair of name and module per member; the name is None if the members have none."""
        names = self.module if self._is_named else [None] * len(self)
        return list(zip(names, self))

    def _place(self, index: int | str) -> int:
        """Convert the index or name of a member to a position."""
        if isinstance(index, str):
            if not self._is_named:
                raise TypeError(
                    f"the members of this {type(self).__name__} have no names; got the index {index!r}"
                )
            if index not in self.module:
                raise KeyError(index)
            return list(self.module).index(index)
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(
                f"index {index} is out of range: the {type(self).__name__} has {len(self)} members"
            )
        return place % len(self)

    def _replace(self, pairs: list[tuple[str | None, Any]]) -> None:
        """Replace all members and update the keys. Raise SelectionError if a selected key would be lost."""
        container = _contain(pairs, self._is_named)
        in_keys, out_keys = self._compute_in_and_out_keys(_members(container))
        gone = [key for key in self._selected_out_keys or () if key not in out_keys]
        if gone:
            raise SelectionError(
                f"the edit would remove the selected out_keys {gone}; call reset_out_keys() first, or select other keys"
            )
        self._take_members(container, in_keys, out_keys)

    def _take_members(
        self, container: nn.ModuleList | nn.ModuleDict, in_keys: list[Key], out_keys: list[Key]
    ) -> None:
        container.training = self.training
        self.module = container
        self.__dict__.update(_all_in_keys=tuple(in_keys), _all_out_keys=tuple(out_keys))

    def _with(self, pairs: list[tuple[str | None, Any]]) -> Self:
        """Return a sequence of other members with the same type and options, but without the selection."""
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        for name, value in self.__dict__.items():
            if name not in new.__dict__ and name != "_selected_out_keys":
                new.__dict__[name] = value
        new.training = self.training
        container = _contain(pairs, self._is_named)
        new._take_members(container, *self._compute_in_and_out_keys(_members(container)))
        return new

    def select_subsequence(
        self, in_keys: Sequence[NestedKey] | None = None, out_keys: Sequence[NestedKey] | None = None
    ) -> Self:
        """Return a sequence of the members that are needed to compute some keys from others.

        Functions without keys are kept between the first and the last selected member. Nested sequences are cut in the
        same way. The new sequence shares the members.

        Args:
            in_keys: the available keys; by default those that the sequence reads.
            out_keys: the requested keys; by default those that the sequence writes.

        Raises:
            ValueError: no member is left.

        >>> seq = TensorDictSequential(
        ...     TensorDictModule(abs, ["x"], ["y"]), TensorDictModule(abs, ["x"], ["z"])
        ... )
        >>> seq.select_subsequence(out_keys=["z"]).out_keys
        ['z']
        """
        known = {*self.in_keys, *self.out_keys}
        provided = self.in_keys if in_keys is None else as_keys(in_keys, "in_keys", known=known)
        wanted = self.out_keys if out_keys is None else as_keys(out_keys, "out_keys", known=known)
        able = self._cut_inputs(dict.fromkeys(provided))
        result = None if able is None else able._cut_outputs(dict.fromkeys(wanted))
        if result is None:
            raise ValueError(
                f"no member is left of those that read {list(provided)} and what follows from it, and that {list(wanted)} needs; "
                f"the sequence reads {self.in_keys} and writes {self.out_keys}"
            )
        return result

    def _cut_inputs(self, options: dict[Key, None]) -> Self | None:
        """Return the members that can run on the keys ``options``; add their outputs to ``options``."""
        kept = []
        for name, module in self._pairs():
            part = module
            if isinstance(module, TensorDictSequential):
                part = module._cut_inputs(options)
            elif not all(is_provided(key, options) for key in module.in_keys):
                part = None
            if part is not None:
                kept.append((name, part))
                options.update(dict.fromkeys(part.out_keys))
        return self._trim(kept)

    def _cut_outputs(self, wanted: dict[Key, None]) -> Self | None:
        """Return the members that are needed for the keys ``wanted``; add their inputs to ``wanted``."""
        kept: list[tuple[str | None, Any]] = []
        for name, module in reversed(self._pairs()):
            part = module
            if isinstance(module, TensorDictSequential):
                part = module._cut_outputs(wanted)
            elif _has_keys_declared(module) and not any(
                is_related(key, want) for key in module.out_keys for want in wanted
            ):
                part = None
            if part is not None:
                kept.insert(0, (name, part))
                wanted.update(dict.fromkeys(part.in_keys))
        return self._trim(kept)

    def _trim(self, kept: list[tuple[str | None, Any]]) -> Self | None:
        """Return a sequence from the first to the last member with keys; None if there are none."""
        keyed = [place for place, (_, module) in enumerate(kept) if _has_keys_declared(module)]
        if not keyed:
            return None
        kept = kept[keyed[0] : keyed[-1] + 1]
        same = len(kept) == len(self) and all(left is other for (_, left), other in zip(kept, self))
        return self if same and self._selected_out_keys is None else self._with(kept)

    def check(self, keys: TensorCollection | Sequence[NestedKey] | None = None) -> FlowReport:
        """Check the keys of the members without a call: find missing, unread and overwritten keys.

        Args:
            keys: a collection, or the keys of the input; by default those that the sequence reads.

        >>> seq = TensorDictSequential(
        ...     TensorDictModule(abs, ["x"], ["hidden"]),
        ...     TensorDictModule(abs, ["hiden"], ["y"]),
        ...     selected_out_keys=["y"],
        ... )
        >>> print(seq.check(["x"]))
        missing: seq[1] reads 'hiden', which is not there; did you mean 'hidden'?
        unread: seq[0] writes 'hidden', which no later member reads
        """
        return check_flow(self, keys)

    def graph(self) -> str:
        """Return a Mermaid diagram of the data flow.

        >>> print(TensorDictSequential(TensorDictModule(abs, ["x"], ["y"])).graph())
        flowchart LR
            m0["[0] TensorDictModule(abs)"]
            k0(["x"]) --> m0
            m0 --> k1(["y"])
        """
        return draw_flow(self)

    def __str__(self) -> str:
        return show_flow(self)


def run_on_members(module: TensorDictModuleBase, tensordict: TensorCollection) -> None:
    """Run a module on the members of a lazy stack that have its inputs; a no-op for other collections."""
    for member in getattr(tensordict, "tensordicts", ()):
        if has_keys(member, module.in_keys):
            module(member)


def _list_overwritten(before: TensorCollection, result: TensorCollection, kept: Sequence[Key]) -> list[Key]:
    """Return the keys of inputs that are not ``kept``: those that a member overwrote stay in the result, too."""
    keys = before.keys(True)
    return [key for key in result.keys(True, True) if key in keys and key not in kept]


def has_keys(tensordict: TensorCollection, keys: Iterable[Key]) -> bool:
    """Return True if a collection has all keys."""
    return all(has_key(tensordict, key) for key in keys)


def _pairs(modules: tuple[object, ...]) -> list[tuple[str | None, Any]]:
    """Convert the arguments of a constructor to pairs of name and module; the name is None without names."""
    first = modules[0] if modules else None
    if len(modules) == 1 and isinstance(first, (Mapping, nn.ModuleDict)):
        wrong = [name for name in first if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"the name of a member is a string; got {', '.join(map(repr, wrong))}")
        return list(first.items())
    if isinstance(first, (list, tuple, nn.ModuleList)):
        modules = (*first, *modules[1:])
    return [(None, module) for module in modules]


def _contain(
    pairs: list[tuple[str | None, Any]], is_named: bool | None = None
) -> nn.ModuleList | nn.ModuleDict:
    """Put members in a ModuleDict if they have names or ``is_named`` is True, else in a ModuleList."""
    members = [(name, _as_member(module)) for name, module in pairs]
    if is_named or (is_named is None and members and members[0][0] is not None):
        return nn.ModuleDict({str(name): module for name, module in members})
    return nn.ModuleList([module for _, module in members])


def _members(container: nn.ModuleList | nn.ModuleDict) -> list[Any]:
    return list(container._modules.values())


def _as_member(module: object) -> nn.Module:
    if TensorDictModuleBase.is_tdmodule_compatible(module):
        if isinstance(module, nn.Module):
            return module
        raise TypeError(
            f"a {type(module).__name__} has keys and is not an nn.Module, so it cannot be a member of a sequence: its "
            "parameters would be lost; wrap it in a function of the collection if that is what you want"
        )
    if isinstance(module, type) or not callable(module):
        raise TypeError(f"a member of a sequence is a module or a function of a collection; got {module!r}")
    return WrapModule(module)


def _has_keys_declared(module: nn.Module) -> bool:
    return bool(module.in_keys or module.out_keys)
