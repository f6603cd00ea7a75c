"""``save`` and ``load`` in any registered format, and the protocols of pickles and copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .._encode.node_kinds import as_named, encode
from .._encode.pickling import (
    copy_deeply,
    copy_with_attributes,
    make_state,
    reduce_collection,
    restore_state,
)
from .._formats.locations import Location, show_location
from .._formats.saving import bind_options, load_as_class, load_in_place, save_without_defaults
from .._formats.saving import open as open_saved
from .._tree.node import Core
from .._tree.stored_leaves import list_row_blocks
from ..errors import BatchSizeError
from ..typing import NestedKey, Progress

if TYPE_CHECKING:
    from typing_extensions import Self


class SaveMixin(Core):
    """``save`` and ``load`` in any registered format."""

    __slots__ = ()

    def save(
        self,
        prefix: Location | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: Progress = False,
        allow_pickle: bool = False,
        compatible: bool = False,
        format: str | None = None,
        **options: object,
    ) -> Self:
        """Save the collection at ``prefix``; see :func:`td_core.save`.

        The options are those of :meth:`memmap` and those of the format. Options of :meth:`memmap` that the format lacks are
        ignored if they have their defaults; other unknown options raise TypeError.
        """
        options.update(
            copy_existing=copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            existsok=existsok,
            robust_key=robust_key,
            archive=archive,
            compression=compression,
            atomic=atomic,
            durable=durable,
            checksums=checksums,
            progress=progress,
            allow_pickle=allow_pickle,
            compatible=compatible,
        )
        return save_without_defaults(self, prefix, format, options, _DEFAULTS)

    dumps = save

    @classmethod
    def load(cls, prefix: Location, *args: object, format: str | None = None, **kwargs: object) -> Self:
        """Load the collection saved at ``prefix``; see :func:`td_core.load`.

        The options ``device`` and ``non_blocking`` can be passed by position. A class with declared entries returns an instance
        of itself, whatever class was saved.
        """
        options = bind_options(args, kwargs, ("device", "non_blocking"))
        loaded: Self = load_as_class(cls, prefix, format, options)
        return loaded

    @classmethod
    def open(
        cls,
        path: Location,
        *,
        mode: str = "r",
        keys: Iterable[NestedKey] | NestedKey | None = None,
        format: str | None = None,
        **options: object,
    ) -> Self:
        """Open the collection saved at ``path``, without reading its leaves; see :func:`td_core.open`.

        A class with declared entries returns an instance of itself, whatever class was saved.
        """
        opened: Self = as_named(
            cls,
            open_saved(path, mode=mode, keys=keys, format=format, **options),
            f"what is saved at {show_location(path)}",
        )
        return opened

    def row_blocks(self) -> list[range]:
        """Return the rows in blocks that end where the chunks of the store end.

        A sampler that shuffles the blocks, and then the rows of a few blocks together, reads each chunk once. The blocks are
        ranges of the first batch dim. A leaf in memory, mapped or without chunks has no influence; without a leaf in chunks,
        all rows are one block. The chunks of leaves should have the same number of rows, or multiples: a block ends where a
        chunk of every leaf ends.

        Raises:
            BatchSizeError: the collection has no batch dim.

        >>> TensorDict({"a": torch.zeros(5)}, [5]).row_blocks()
        [range(0, 5)]
        """
        if not self.batch_size:
            raise BatchSizeError("a collection without batch dims has no rows: give it a batch size first")
        return list_row_blocks(self.batch_size[0], self._leaves())

    def load_(self, prefix: Location, *args: object, format: str | None = None, **kwargs: object) -> Self:
        """Copy the save at ``prefix`` into this collection, in place; raises as :func:`td_core.load`.

        The option ``robust_key`` can be passed by position.
        """
        load_in_place(self, prefix, format, bind_options(args, kwargs, ("robust_key",)))
        return self


#: The defaults of the options that :meth:`SaveMixin.save` has for all formats.
_DEFAULTS = {"copy_existing": False, **(SaveMixin.save.__kwdefaults__ or {})}


class PickleMixin(Core):
    """The pickle and copy protocols.

    Deep copies and pickles keep the attributes that were set on instances of subclasses and on modules, in every node;
    :func:`copy.copy` keeps those of the root. Operations and other formats drop them.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        """Return a rebuild function and plain arguments, or the result of a ``__reduce__`` that the class defines."""
        if (
            type(self).__reduce__ is not object.__reduce__
            or type(self).__getstate__ is not PickleMixin.__getstate__
        ):
            return object.__reduce_ex__(self, protocol)  # type: ignore[return-value]
        return reduce_collection(self, protocol)

    def __getstate__(self) -> tuple[object, ...]:
        """Return the encoded tree for ``__setstate__``."""
        encoded = encode(self, shared=True)
        return make_state(encoded, encoded.leaves)

    def __setstate__(self, state: object) -> None:
        """Restore the collection that ``__getstate__`` encoded, or set the attributes of the root."""
        restore_state(self, state)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Copy the leaves and values; an object that occurs twice is copied once."""
        return copy_deeply(self, memo)

    def __copy__(self) -> Self:
        """Return a shallow copy: new nodes, the same leaves."""
        return copy_with_attributes(self)
