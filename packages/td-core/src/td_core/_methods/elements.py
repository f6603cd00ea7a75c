"""The methods ``repeat``, ``tile``, ``roll``, ``flip``, ``rot90``, ``narrow`` and related ones."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

from torch import Tensor
from typing_extensions import Self

from .._functions.locking import write_back_on_exit
from .._functions.shape import (
    parse_ints,
    repeat_batch,
    repeat_elements,
    roll_batch,
    rotate_batch,
    tile_batch,
    write_back_inverse,
)
from .._plans import elements
from .._plans.plans import as_ints, check_ints
from .._tree.dim_names import find_dims
from .._tree.node import Core


class ElementMixin(Core):
    """The methods ``repeat``, ``tile``, ``roll``, ``flip``, ``rot90``, ``narrow`` and related ones."""

    __slots__ = ()

    def repeat(self, *repeats: object, inplace: bool = False) -> Self:
        """Repeat the collection along each batch dim, as :meth:`torch.Tensor.repeat` does.

        Args:
            *repeats: number of repeats per batch dim, as ints or one sequence.
            inplace: change this collection instead of returning a new one.

        Raises:
            ValueError: the number of repeats is not the number of batch dims.
            BatchSizeError: a number of repeats is negative.

        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat(2)["a"]
        tensor([0, 1, 0, 1])
        """
        return repeat_batch(self, parse_ints("repeat", repeats), inplace)

    def repeat_interleave(
        self,
        repeats: Tensor | int,
        dim: int | str | None = None,
        *,
        output_size: int | None = None,
        inplace: bool = False,
    ) -> Self:
        """Repeat each element along a batch dim, as :func:`torch.repeat_interleave` does.

        Args:
            repeats: number of repeats; a tensor has one number per element of the dim.
            dim: the batch dim; None flattens the batch dims first.
            output_size: size of the dim in the result, if known; avoids a device synchronization.
            inplace: change this collection instead of returning a new one.

        Raises:
            BatchSizeError: ``repeats`` does not match the size of the dim, or is negative.
            RuntimeError: ``output_size`` is not the size of the result.

        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2, dim=0)["a"]
        tensor([0, 0, 1, 1])
        """
        return repeat_elements(self, repeats, find_dims(self, "repeat_interleave", dim), output_size, inplace)

    def tile(self, dims: int | Sequence[int], *more: int) -> Self:
        """Repeat the collection along batch dims; if ``dims`` is shorter than the batch size, it applies to the last dims.

        >>> TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).tile((2,)).batch_size
        torch.Size([2, 6])
        """
        given = (dims, *more) if more else dims
        check_ints("tile", "dims", given, "int | Sequence[int]")
        return tile_batch(self, as_ints(given))

    def roll(
        self,
        shifts: int | tuple[int, ...],
        dims: int | str | tuple[int | str, ...] | None = None,
        *,
        inplace: bool = False,
    ) -> Self:
        """Shift the elements along batch dims, as :func:`torch.roll` does: elements past the end reappear at the start.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            shifts: number of positions per dim.
            dims: the batch dims; None rolls the flattened batch.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: a dim is out of range.
            BatchSizeError: the numbers of shifts and dims differ.

        >>> TensorDict({"a": torch.arange(3)}, [3]).roll(1, 0)["a"]
        tensor([2, 0, 1])
        """
        return roll_batch(self, shifts, find_dims(self, "roll", dims), inplace)

    def flip(self, dims: int | str | Sequence[int | str], *more: int | str) -> Self:
        """Return a copy with the order of elements reversed along some batch dims.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Raises:
            DimError: a dim is out of range or repeated.

        >>> TensorDict({"a": torch.arange(3)}, [3]).flip(0)["a"]
        tensor([2, 1, 0])
        """
        dims = find_dims(self, "flip", (dims, *more) if more else dims)
        result = self._transform(elements.flip_plan(self.batch_size, dims))
        return write_back_on_exit(result, self, write_back_inverse, methodcaller("flip", dims))

    def fliplr(self) -> Self:
        """Return a copy with the order of elements reversed along the second batch dim.

        Raises:
            DimError: the collection has fewer than two batch dims.

        >>> TensorDict({"a": torch.tensor([[0, 1]])}, [1, 2]).fliplr()["a"]
        tensor([[1, 0]])
        """
        return self.flip(1)

    def flipud(self) -> Self:
        """Return a copy with the order of elements reversed along the first batch dim.

        Raises:
            DimError: the collection has no batch dims.

        >>> TensorDict({"a": torch.arange(2)}, [2]).flipud()["a"]
        tensor([1, 0])
        """
        return self.flip(0)

    def rot90(self, k: int = 1, dims: tuple[int | str, int | str] = (0, 1)) -> Self:
        """Return a copy rotated by ``k`` quarter turns from the first towards the second of two batch dims.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Raises:
            DimError: a dim is out of range, or ``dims`` is not two different dims.

        >>> TensorDict({"a": torch.tensor([[0, 1], [2, 3]])}, [2, 2]).rot90()["a"]
        tensor([[1, 3],
                [0, 2]])
        """
        check_ints("rot90", "k", k, "int")
        return rotate_batch(self, k, dims)

    def narrow(self, dim: int | str, start: int | Tensor, length: int) -> Self:
        """Return a view of ``length`` elements of a batch dim, starting at ``start``.

        Raises:
            DimError: the dim or the start is out of range.
            BatchSizeError: the dim has fewer than ``start + length`` elements.

        >>> TensorDict({"a": torch.arange(5)}, [5]).narrow(0, 1, 3)["a"]
        tensor([1, 2, 3])
        """
        place = dim if type(dim) is int else find_dims(self, "narrow", dim)
        return self._transform(elements.narrow_plan(self.batch_size, place, start, length))
