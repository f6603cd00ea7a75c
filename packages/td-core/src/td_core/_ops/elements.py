"""Operations that repeat, reorder or choose elements within the batch dims."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any, TypeVar

from torch import Tensor

from .. import _element_plans as elements
from .._plans import as_ints, wrap_dim
from ..errors import DimError
from .shape import ShapeMixin, parse_ints, write_back

SelfT = TypeVar("SelfT", bound="ElementMixin")


class ElementMixin(ShapeMixin):
    """``repeat``, ``roll``, ``flip``, ``narrow`` and their kin."""

    __slots__ = ()

    def repeat(self: SelfT, *repeats: Any, inplace: bool = False) -> SelfT:
        """Return copies of the collection side by side.

        Args:
            *repeats: how often along each batch dim, as ints or one sequence.
            inplace: change this collection instead of returning a new one.

        Raises:
            ValueError: there is not one number for each batch dim.
            BatchSizeError: a number is negative.

        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat(2)["a"]
        tensor([0, 1, 0, 1])
        """
        times = parse_ints("repeat", repeats)
        if len(times) != len(self.batch_size):
            raise ValueError(
                f"repeat: there must be one number for each batch dim; got {list(times)} for the batch size "
                f"{list(self.batch_size)}"
            )
        result = self._transform(elements.repeat_plan(self.batch_size, times))
        return self._adopt_result(result, "repeat") if inplace else result

    def repeat_interleave(
        self: SelfT,
        repeats: Tensor | int,
        dim: int | None = None,
        *,
        output_size: int | None = None,
        inplace: bool = False,
    ) -> SelfT:
        """Return each element repeated in its place.

        Args:
            repeats: how often; a tensor gives one number for each element of the dim.
            dim: the batch dim; None flattens the batch first.
            output_size: the size of the dim afterwards, if known; saves a read back from a device.
            inplace: change this collection instead of returning a new one.

        Raises:
            BatchSizeError: ``repeats`` do not fit the dim, or are negative.
            RuntimeError: ``output_size`` is not the size of the result.

        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2, dim=0)["a"]
        tensor([0, 0, 1, 1])
        """
        source = self.reshape(-1) if dim is None else self
        plan = elements.repeat_interleave_plan(source.batch_size, repeats, dim or 0, output_size)
        result = source._transform(plan)
        return self._adopt_result(result, "repeat_interleave") if inplace else result

    def tile(self: SelfT, dims: int | Sequence[int]) -> SelfT:
        """Return copies of the collection side by side; fewer numbers than batch dims apply to the last ones.

        >>> TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).tile((2,)).batch_size
        torch.Size([2, 6])
        """
        times = as_ints(dims)
        times = (1,) * (len(self.batch_size) - len(times)) + times
        return self._transform(elements.repeat_plan(self.batch_size, times))

    def roll(
        self: SelfT,
        shifts: int | tuple[int, ...],
        dims: int | tuple[int, ...] | None = None,
        *,
        inplace: bool = False,
    ) -> SelfT:
        """Return the elements shifted along batch dims; what leaves at one end comes in at the other.

        As a context, what was written is written back on exit.

        Args:
            shifts: by how many places, for each dim.
            dims: the dims; None rolls the flattened batch.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: a dim is out of range.
            BatchSizeError: there are not as many shifts as dims.

        >>> TensorDict({"a": torch.arange(3)}, [3]).roll(1, 0)["a"]
        tensor([2, 0, 1])
        """
        result = self._transform(elements.roll_plan(self.batch_size, shifts, dims))
        if inplace:
            return self._adopt_result(result, "roll")
        back = tuple([-shift for shift in as_ints(shifts)])
        return result._write_back_on_exit(self, _write_inverse, methodcaller("roll", back, dims))

    def flip(self: SelfT, dims: int | Sequence[int]) -> SelfT:
        """Return a copy with some batch dims in reverse.

        As a context, what was written is written back on exit.

        Raises:
            DimError: a dim is out of range, or given twice.

        >>> TensorDict({"a": torch.arange(3)}, [3]).flip(0)["a"]
        tensor([2, 1, 0])
        """
        result = self._transform(elements.flip_plan(self.batch_size, dims))
        return result._write_back_on_exit(self, _write_inverse, methodcaller("flip", dims))

    def fliplr(self: SelfT) -> SelfT:
        """Return a copy with the second batch dim in reverse.

        Raises:
            DimError: there are fewer than two batch dims.

        >>> TensorDict({"a": torch.tensor([[0, 1]])}, [1, 2]).fliplr()["a"]
        tensor([[1, 0]])
        """
        return self.flip(1)

    def flipud(self: SelfT) -> SelfT:
        """Return a copy with the first batch dim in reverse.

        Raises:
            DimError: there is no batch dim.

        >>> TensorDict({"a": torch.arange(2)}, [2]).flipud()["a"]
        tensor([1, 0])
        """
        return self.flip(0)

    def rot90(self: SelfT, k: int = 1, dims: tuple[int, int] = (0, 1)) -> SelfT:
        """Return a copy rotated by ``k`` quarter turns from the first towards the second of two batch dims.

        As a context, what was written is written back on exit.

        Raises:
            DimError: a dim is out of range, or the dims are not two different ones.

        >>> TensorDict({"a": torch.tensor([[0, 1], [2, 3]])}, [2, 2]).rot90()["a"]
        tensor([[1, 3],
                [0, 2]])
        """
        plane = tuple(wrap_dim(dim, len(self.batch_size)) for dim in dims)
        if len(set(plane)) != 2 or len(plane) != 2:
            raise DimError(f"rot90: the plane is given by two different dims; got {dims}")
        turns = k % 4
        if turns == 0:
            result = self.flip(())
        elif turns == 2:
            result = self.flip(plane)
        else:
            result = self.flip(plane[1] if turns == 1 else plane[0]).transpose(*plane)
        return result._write_back_on_exit(self, _write_inverse, methodcaller("rot90", -k, dims))

    def narrow(self: SelfT, dim: int, start: int | Tensor, length: int) -> SelfT:
        """Return a view of ``length`` elements of a batch dim, from ``start``.

        Raises:
            DimError: the dim or the start is out of range.
            BatchSizeError: there are not so many elements.

        >>> TensorDict({"a": torch.arange(5)}, [5]).narrow(0, 1, 3)["a"]
        tensor([1, 2, 3])
        """
        return self._transform(elements.narrow_plan(self.batch_size, dim, start, length))


def _write_inverse(owner: Any, result: Any, inverse: Any) -> None:
    write_back(owner, inverse(result))
