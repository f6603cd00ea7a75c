"""Views of data: several parts as one, runs of rows within episodes, and packed documents."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from td_core import NO_DEFAULT, StructureError, is_tensor_collection
from td_core.spi import check_rows
from td_core.typing import NestedKey

from ._order import as_positions, check_count, check_seed, make_keys, mix, permute
from ._reading import join_batches, read_in_runs

#: Rows of a key that are read at a time, to find episodes.
_BLOCK = 1 << 20


class View(ABC):
    """Rows that are read by position: ``view[positions]`` is a batch, ``view[i]`` one row."""

    #: What decides the entries and the batch size of a batch, apart from those of the rows.
    _form: object = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, positions: Tensor) -> Any:
        """Return the batch of positions that exist."""

    def __getitem__(self, index: Any) -> Any:
        """Return the rows at positions, in a slice, or one row."""
        if isinstance(index, slice):
            return self._read(torch.arange(*index.indices(len(self))))
        if not isinstance(index, (Tensor, list, tuple)):
            return self[[operator.index(index)]][0]
        positions = as_positions(index, "a view takes a vector of positions")
        wrong = (positions < -len(self)) | (positions >= len(self))
        if bool(wrong.any()):
            raise IndexError(
                f"position {int(positions[wrong][0])} is out of range: the view has {len(self)} rows"
            )
        return self._read(torch.where(positions < 0, positions + len(self), positions))

    def load_rows(self, positions: Tensor) -> Any:
        """Read many rows at once, for a window of blocks; return a view of them in memory."""
        return read_in_runs(self, positions)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch, for a ``DataLoader`` of torch."""
        return self[indices]


class Concat(View):
    """Several views as one, one after another.

    Args:
        parts: views with the same keys, dtypes and shapes of rows; a mapping adds the number of the part, in the order of the
            mapping, as the entry ``"source"``.

    >>> from td_data import Concat
    >>> one, two = TensorDict({"a": torch.arange(3)}, [3]), TensorDict({"a": torch.arange(10, 12)}, [2])
    >>> Concat([one, two])[torch.tensor([4, 0])]["a"]
    tensor([11,  0])
    >>> Concat({"web": one, "books": two})[torch.tensor([4, 0])]["source"]
    tensor([1, 0])
    """

    def __init__(self, parts: Sequence[Any] | Mapping[str, Any]) -> None:
        self.names = list(parts) if isinstance(parts, Mapping) else None
        self.parts = list(map(as_view, parts.values() if isinstance(parts, Mapping) else parts))
        if not self.parts:
            raise ValueError("Concat needs one part or more")
        self.lengths = [len(part) for part in self.parts]
        self._ends = torch.tensor(self.lengths).cumsum(0)
        first, self._form = _find_rows(self.parts[0]), getattr(self.parts[0], "_form", None)
        for name, part in zip(self.names or range(len(self.parts)), self.parts):
            rows = _find_rows(part)
            if (rows is None) != (first is None) or getattr(part, "_form", None) != self._form:
                raise StructureError(
                    f"part {name!r} is a {type(part).__name__}, the first is a {type(self.parts[0]).__name__}, or rows of "
                    "another length"
                )
            if rows is None or first is None:
                continue
            if self.names and "source" in rows.keys():  # noqa: SIM118
                raise StructureError(
                    f"part {name!r} has an entry 'source', which the names of the parts would replace"
                )
            try:
                check_rows(first[:1], rows[:1])
            except StructureError as error:
                raise StructureError(f"part {name!r} differs from the first part: {error}") from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _read(self, positions: Tensor) -> Any:
        source = torch.searchsorted(self._ends, positions, right=True)
        places, batches = [], []
        for number in source.unique().tolist():
            places.append((source == number).nonzero().flatten())
            first = int(self._ends[number]) - self.lengths[number]
            batches.append(self.parts[number][positions[places[-1]] - first])
        batch = self.parts[0][positions] if not batches else join_batches(batches)
        if len(batches) > 1:
            batch = batch[torch.cat(places).argsort()]
        if self.names is not None:
            set_entry(batch, "source", source)
        return batch

    def at_epoch(self, epoch: int) -> Concat:
        """Return the parts of an epoch, such as packed documents in another order."""
        if not any(hasattr(part, "at_epoch") for part in self.parts):
            return self
        result = copy.copy(self)
        result.parts = [part.at_epoch(epoch) if hasattr(part, "at_epoch") else part for part in self.parts]
        return result

    def row_blocks(self) -> list[range]:
        """Return the blocks of the parts, for a :class:`BlockSampler`."""
        blocks = []
        for part, stop, length in zip(self.parts, self._ends.tolist(), self.lengths):
            own = part.row_blocks() if hasattr(part, "row_blocks") else [range(length)]
            blocks += [range(block.start + stop - length, block.stop + stop - length) for block in own]
        return blocks


def set_entry(batch: Any, key: NestedKey, value: Tensor) -> None:
    """Add an entry for the first batch dims of a batch, the same for all elements of further ones."""
    more = len(batch.batch_size) - value.ndim
    if more > 0:
        value = value.view(*value.shape, *[1] * more).expand(batch.batch_size).clone()
    batch.set(key, value)


def _find_rows(view: Any) -> Any:
    """Return the collection that a view gives rows of, or None for a user's view."""
    while isinstance(view, (Concat, Selected, Slices, Packed)):
        view = view.parts[0] if isinstance(view, Concat) else view.data
    return view if is_tensor_collection(view) else None


class Selected(View):
    """The rows of a view that a ``Subset`` of torch selects."""

    def __init__(self, data: object, indices: Sequence[int] | Tensor) -> None:
        self.data, self.indices = as_view(data), torch.as_tensor(indices, dtype=torch.int64)
        self._form = getattr(self.data, "_form", None)

    def __len__(self) -> int:
        return len(self.indices)

    def _read(self, positions: Tensor) -> Any:
        return self.data[self.indices[positions]]

    def at_epoch(self, epoch: int) -> Selected:
        """Return the rows of an epoch."""
        return Selected(self.data.at_epoch(epoch), self.indices) if hasattr(self.data, "at_epoch") else self


def as_view(data: object) -> Any:
    """Return a view of what ``random_split`` of torch returns, or of several data sets as one; other data as it is."""
    if type(data) is Subset:
        return Selected(data.dataset, data.indices)
    return Concat(data.datasets) if type(data) is ConcatDataset else data


class Slices(View):
    """Runs of rows within episodes: a batch of them has the batch size ``[n, slice_len]``.

    Args:
        data: the rows of all episodes, one after another.
        slice_len: rows of a slice.
        traj_key: key whose value changes where an episode begins.
        end_key: key that is True in the last row of an episode.
        ends: position after the last row of each episode, in place of a key.
        stride: distance of the first rows of two neighbouring slices; ``slice_len`` gives slices without overlap.
        pad: also give slices that reach beyond the end of their episode, filled with its last row.
        pad_key: key that is then True where a row is filled in.

    >>> from td_data import Slices
    >>> data = TensorDict({"step": torch.tensor([0, 1, 2, 0, 1])}, batch_size=[5])
    >>> Slices(data, 2, ends=[3, 5])[torch.arange(3)]["step"]
    tensor([[0, 1],
            [1, 2],
            [0, 1]])
    """

    def __init__(
        self,
        data: Any,
        slice_len: int,
        *,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        ends: Any = None,
        stride: int = 1,
        pad: bool = False,
        pad_key: NestedKey = "is_pad",
    ) -> None:
        self.data, self.slice_len = data, check_count(slice_len, "slice_len")
        self._stride, self._pad, self._pad_key = check_count(stride, "stride"), pad, pad_key
        if sum(value is not None for value in (traj_key, end_key, ends)) != 1:
            raise ValueError("episodes come from exactly one of traj_key, end_key and ends")
        self._form = "Slices", slice_len, pad and pad_key
        if ends is None:
            ends = _find_ends(data, traj_key if end_key is None else end_key, end_key is not None)
        self._ends = _check_ends(ends, len(data), "rows")
        self._starts = torch.cat([self._ends.new_zeros(1), self._ends[:-1]])
        sizes = self._ends - self._starts
        counts = sizes if pad else (sizes - self.slice_len + 1).clamp(min=0)
        self._counts = (-(-counts // self._stride)).cumsum(0)
        if not len(self) and len(data):
            raise ValueError(
                f"no episode has {self.slice_len} rows; the longest one has {int(sizes.max())}: pad=True fills slices"
            )

    def __len__(self) -> int:
        return int(self._counts[-1]) if len(self._counts) else 0

    def _find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of slices, and which of them are filled in."""
        episode = torch.searchsorted(self._counts, positions, right=True)
        before = torch.where(episode > 0, self._counts[episode - 1], 0)
        first = self._starts[episode] + (positions - before) * self._stride
        rows = first[:, None] + torch.arange(self.slice_len)
        last = self._ends[episode, None] - 1
        return rows.minimum(last), rows > last

    def _read(self, positions: Tensor) -> Any:
        rows, is_pad = self._find(positions)
        return self._finish(self.data[rows.flatten()], rows, is_pad)

    def _finish(self, batch: Any, rows: Tensor, is_pad: Tensor) -> Any:
        batch = batch.unflatten(0, rows.shape)
        if self._pad:
            set_entry(batch, self._pad_key, is_pad)
        return batch

    def load_rows(self, positions: Tensor) -> Any:
        """Read the rows of many slices, each row once, and return a view of these slices in memory."""
        rows, is_pad = self._find(positions)
        needed, places = rows.unique(return_inverse=True)
        read = (
            read_in_runs
            if isinstance(self.data, View) or is_tensor_collection(self.data)
            else operator.getitem
        )
        return _LoadedSlices(self, read(self.data, needed), places, is_pad)

    def row_blocks(self) -> list[range]:
        """Return the slices whose first rows are in a block of the data, for a :class:`BlockSampler`."""
        if not len(self):
            return []
        own = self.data.row_blocks() if hasattr(self.data, "row_blocks") else [range(len(self.data))]
        starts = torch.tensor([block.start for block in own] + [len(self.data)])
        episode = torch.searchsorted(self._ends, starts, right=True).clamp(max=len(self._ends) - 1)
        before = torch.where(episode > 0, self._counts[episode - 1], 0)
        inside = -(-(starts - self._starts[episode]) // self._stride)
        items = (before + inside.clamp(min=0)).minimum(self._counts[episode]).tolist()
        return [range(first, last) for first, last in pairwise(items) if first < last]


class _LoadedSlices:
    """Slices whose rows are in memory."""

    def __init__(self, slices: Slices, rows: Any, places: Tensor, is_pad: Tensor) -> None:
        self._slices, self._rows, self._places, self._is_pad = slices, rows, places, is_pad

    def __getitem__(self, index: Tensor) -> Any:
        places = self._places[index]
        return self._slices._finish(self._rows[places.flatten()], places, self._is_pad[index])


def _check_ends(ends: Any, count: int, what: str) -> Tensor:
    result = as_positions(ends, "ends is a vector")
    if bool((result.diff(prepend=result.new_zeros(1)) <= 0).any()):
        raise ValueError("ends must increase, from 1 on: each is the position after the last row")
    if (int(result[-1]) if len(result) else 0) != count:
        raise ValueError(f"the last of ends is the number of {what}, {count}; got {result[-1:].tolist()}")
    return result


def _find_ends(data: Any, key: Any, is_end: bool) -> Tensor:
    """Return the ends of episodes; reads one key, in blocks."""
    ends, count, before = [], 0, None
    for values in _list_values(data, key):
        ends.append(find_episode_ends(values, is_end, before) + count)
        count, before = count + len(values), values[-1:]
    found: Tensor = torch.cat([*ends, torch.tensor([count])]).unique()
    return found[found > 0]


def _list_values(data: Any, key: NestedKey) -> Iterator[Tensor]:
    """Iterate over the values of a key, in blocks."""
    if isinstance(data, Concat):
        for part in data.parts:
            yield from _list_values(part, key)
        return
    leaf = data.get(key, NO_DEFAULT) if is_tensor_collection(data) else None
    for start in range(0, len(data), _BLOCK):
        stop = min(start + _BLOCK, len(data))
        yield data[torch.arange(start, stop)][key] if leaf is None else leaf[start:stop].clone()


def find_episode_ends(values: Tensor, is_end: bool, before: Tensor | None) -> Tensor:
    """Return the positions after the ends of episodes in some rows, but for the end of the rows themselves."""
    if not is_end:
        both = values if before is None else torch.cat([before, values])
        values = both[1:] != both[:-1]
    values = values.flatten(1).any(1) if values.ndim > 1 else values
    return values.nonzero().flatten() + (1 if is_end or before is None else 0)


class Packed(View):
    """Documents that are put one after another and cut into blocks of tokens, in another order in each epoch.

    A batch has the keys of the tokens, ``"document"`` with the number of the document of each token and ``"position"`` with its
    position there, and the batch size ``[n, seq_len + extra]``. The tokens after the last whole block are not given out.

    Args:
        tokens: a collection with a row for each token.
        seq_len: tokens of a block.
        ends: position after the last token of each document.
        extra: further tokens of each block, which are the first ones of the next: 1 for the labels of the last token.
        shuffle: give the documents in random order.
        seed: seed of the order.

    >>> from td_data import Packed
    >>> tokens = TensorDict({"token": torch.arange(10)}, batch_size=[10])
    >>> packed = Packed(tokens, 4, ends=[3, 10], shuffle=False)
    >>> packed[torch.tensor([0])]["document"]
    tensor([[0, 0, 0, 1]])
    >>> Packed.boundaries(packed[torch.tensor([0, 1])])
    (tensor([0, 3, 4, 8], dtype=torch.int32), 4)
    """

    def __init__(
        self, tokens: Any, seq_len: int, *, ends: Any, extra: int = 0, shuffle: bool = True, seed: int = 0
    ) -> None:
        if not is_tensor_collection(tokens):
            raise TypeError(f"tokens is a collection with a row for each token; got {type(tokens).__name__}")
        taken = {"document", "position"} & {*map(str, tokens.keys())}
        if taken:
            raise ValueError(f"tokens has the keys {sorted(taken)}, which batches have for other entries")
        self.data, self.seq_len, self._shuffle = tokens, check_count(seq_len, "seq_len"), shuffle
        self._extra, self._seed = 0 if extra == 0 else check_count(extra, "extra"), check_seed(seed)
        self._form = "Packed", seq_len + extra
        self._ends = _check_ends(ends, len(tokens), "tokens")
        self._starts = torch.cat([self._ends.new_zeros(1), self._ends[:-1]])
        self._turn(0)

    def _turn(self, epoch: int) -> None:
        count = len(self._ends)
        self._epoch, self._documents = epoch, torch.arange(count)
        if self._shuffle and count:
            self._documents = permute(self._documents, count, make_keys(mix(self._seed, epoch, "packed")))
        self._stops = (self._ends - self._starts)[self._documents].cumsum(0)

    def __len__(self) -> int:
        return max(len(self.data) - self._extra, 0) // self.seq_len

    def at_epoch(self, epoch: int) -> Packed:
        """Return the documents in the order of an epoch."""
        if epoch == self._epoch or not self._shuffle:
            return self
        result = copy.copy(self)
        result._turn(epoch)
        return result

    def _read(self, positions: Tensor) -> Any:
        places = positions[:, None] * self.seq_len + torch.arange(self.seq_len + self._extra)
        number = torch.searchsorted(self._stops, places, right=True)
        document = self._documents[number]
        sizes = self._ends[document] - self._starts[document]
        position = places - (self._stops[number] - sizes)
        batch = self.data[(self._starts[document] + position).flatten()].unflatten(0, places.shape)
        set_entry(batch, "position", position)
        set_entry(batch, "document", document)
        return batch

    @staticmethod
    def boundaries(batch: Any) -> tuple[Tensor, int]:
        """Return where documents begin in the flattened batch, of int32 and with the end, and the longest part of one."""
        document = batch["document"]
        is_first = torch.ones_like(document, dtype=torch.bool)
        is_first[:, 1:] = document[:, 1:] != document[:, :-1]
        starts = is_first.flatten().nonzero().flatten()
        bounds = torch.cat([starts, starts.new_tensor([document.numel()])])
        return bounds.int(), int(bounds.diff().max()) if len(starts) else 0
