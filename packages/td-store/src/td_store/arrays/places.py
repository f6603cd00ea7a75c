"""Store a leaf as one or more arrays, and restore it from them.

A *place* in the header describes where a leaf is: the name of an array; ``[name, dim, i]`` for a part of a stack; or an
object, whose fields are listed at :func:`restore`. Every other program reads the arrays alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core.errors import CodecError, FormatError, UnsupportedOperationError
from td_core.spi import STORABLE, JaggedParts, check_whole, expand, get_parts, is_stored

Place = Any

#: The parts of a jagged leaf in its place, in the order of ``get_parts``.
_PARTS = ("values", "offsets", "lengths")

#: An expanded leaf is stored once if that saves at least this many bytes; otherwise other programs read it more easily.
_WORTH_COMPACTING = 1024

#: Dtypes whose elements are stored as pairs of real numbers.
_PAIRS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}

#: Unsigned integers by width in bytes: a format that lacks a dtype stores its elements as these.
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

#: What no tensor can have: that many bytes, and more dims.
_TOO_LARGE, _MOST_DIMS = 1 << 63, 64


class Piece(NamedTuple):
    """An array to write: the end of its name after that of the leaf, and a dense tensor of any strides and device."""

    ending: str
    tensor: Tensor


def split_leaf(
    leaf: Tensor, native: Container[torch.dtype]
) -> tuple[list[Piece], Callable[[list[str]], Place]]:
    """Split a leaf into dense tensors, and a function from the names of their arrays to the place of the leaf."""
    # ``native`` has the dtypes that the format can hold. A sparse or quantized leaf raises CodecError.
    if leaf.is_quantized:
        raise CodecError(
            f"a quantized tensor ({leaf.dtype}) cannot be saved: save int_repr(), scale and zero point"
        )
    if leaf.layout is torch.jagged:
        return _split_jagged(leaf, native)
    if leaf.is_nested:
        return _split_nested(leaf, native)
    if leaf.layout is not torch.strided:
        raise CodecError(
            f"a tensor with the layout {leaf.layout} cannot be saved: convert it with to_dense()"
        )
    dtype, shape = leaf.dtype, leaf.shape
    facts: dict[str, object] = {}
    if 0 in leaf.stride() and leaf.numel():
        whole = leaf
        for dim, step in enumerate(whole.stride()):
            if step == 0 and shape[dim] > 1:
                whole = whole.narrow(dim, 0, 1)
        if (leaf.numel() - whole.numel()) * dtype.itemsize >= _WORTH_COMPACTING:
            leaf, facts["expand"] = whole, list(shape)
    if dtype in native and not facts:
        return [Piece("", leaf)], _only
    if dtype not in native:
        facts["dtype"] = str(dtype)
    return [Piece("", leaf)], lambda names: {"tensor": names[0], **facts}


def _only(names: list[str]) -> Place:
    return names[0]


def _split_jagged(
    leaf: Tensor, native: Container[torch.dtype]
) -> tuple[list[Piece], Callable[[list[str]], Place]]:
    places = {name: split_leaf(part, native) for name, part in zip(_PARTS, get_parts(leaf))}
    pieces = [Piece("" if name == "values" else f"#{name}", places[name][0][0].tensor) for name in places]

    def place(names: list[str]) -> Place:
        below = {part: places[part][1]([name]) for part, name in zip(places, names, strict=True)}
        return {"jagged": below, "dim": JaggedParts.of(leaf).dim}

    return pieces, place


def _split_nested(
    leaf: Tensor, native: Container[torch.dtype]
) -> tuple[list[Piece], Callable[[list[str]], Place]]:
    components = leaf.unbind()
    shapes = [list(component.shape) for component in components]
    flat = [component.reshape(-1) for component in components]
    joined = torch.cat(flat) if flat else torch.zeros(0, dtype=leaf.dtype)
    _, below = split_leaf(joined, native)
    return [Piece("", joined)], lambda names: {"nested": below(names), "shapes": shapes}


def as_storable(tensor: Tensor, native: Container[torch.dtype]) -> Tensor:
    """Return the elements of a dense tensor on the CPU, contiguous, in a dtype that the format has; CodecError for a DTensor."""
    check_whole(tensor)
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    if tensor.dtype in native:
        return tensor.contiguous()
    if tensor.dtype in _PAIRS:
        return torch.view_as_real(tensor.contiguous())
    # First, since torch cannot copy some dtypes.
    return tensor.view(_UNSIGNED[tensor.dtype.itemsize]).contiguous()


def get_stored(
    dtype: torch.dtype, shape: tuple[int, ...], native: Container[torch.dtype] = ()
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape in which :func:`as_storable` stores a tensor."""
    if dtype in native:
        return dtype, shape
    if dtype in _PAIRS:
        return _PAIRS[dtype], (*shape, 2)
    return _UNSIGNED[dtype.itemsize], shape


def restore(place: Place, read: Callable[[str], Tensor]) -> Tensor:
    """Restore a leaf from its place; ``read`` returns the tensor of a named array.

    Fields of a place that is an object: ``tensor`` (name), with ``dtype`` if the format lacks it and ``expand`` (shape)
    if it is stored once; ``packed`` (name of an array of several leaves), ``begin`` and ``shape``; ``jagged`` (places of
    values, offsets, lengths) and ``dim``; ``nested`` (place) and ``shapes``.

    Raises:
        FormatError: the place is malformed, or does not match the tensors.
    """
    if isinstance(place, str):
        return read(place)
    try:
        if isinstance(place, list):
            name, dim, position = place
            return read(name).select(dim, position)
        return next(own for field, own in _RESTORE.items() if field in place)(place, read)
    except UnsupportedOperationError:
        raise
    except StopIteration as error:
        raise FormatError(f"its place in the header is damaged, {place!r:.200}") from error
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise FormatError(f"its place in the header is damaged, {place!r:.200}: {error}") from error


def _restore_jagged(place: Place, read: Callable[[str], Tensor]) -> Tensor:
    parts = {name: restore(below, read) for name, below in place["jagged"].items()}
    return JaggedParts(place["dim"], parts["values"], parts["offsets"], parts.get("lengths")).check().join()


def _restore_nested(place: Place, read: Callable[[str], Tensor]) -> Tensor:
    flat = restore(place["nested"], read)
    if flat.is_meta:
        raise UnsupportedOperationError(
            "a nested tensor of the strided layout has no form on the device 'meta': leave it out with keys="
        )
    parts = flat.split([math.prod(shape) for shape in place["shapes"]])
    components = [part.view(shape) for part, shape in zip(parts, place["shapes"], strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        return torch.nested.nested_tensor(components, dtype=flat.dtype, device=flat.device)


def _restore_packed(place: Place, read: Callable[[str], Tensor]) -> Tensor:
    shape = place["shape"]
    if place["begin"] < 0:
        raise ValueError("its begin is negative")
    return read(place["packed"]).narrow(0, place["begin"], math.prod(shape)).view(shape)


def _restore_converted(place: Place, read: Callable[[str], Tensor]) -> Tensor:
    tensor = read(place["tensor"])
    if "dtype" in place:
        dtype = STORABLE[place["dtype"]]
        if tensor.dtype != get_stored(dtype, ())[0]:
            raise ValueError(f"its array has the dtype {tensor.dtype}")
        tensor = _view_pairs(tensor, dtype) if dtype in _PAIRS else tensor.view(dtype)
    return tensor.expand(place["expand"]) if "expand" in place else tensor


def _view_pairs(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View pairs of numbers as complex ones; a copy if these are not aligned, since torch would crash on them."""
    is_aligned = is_stored(tensor) or tensor.data_ptr() % dtype.itemsize == 0
    return torch.view_as_complex(tensor if is_aligned else tensor.clone())


#: Per field of a place, the function that restores the leaf.
_RESTORE: dict[str, Callable[[Place, Callable[[str], Tensor]], Tensor]] = {
    "jagged": _restore_jagged,
    "nested": _restore_nested,
    "packed": _restore_packed,
    "tensor": _restore_converted,
}


def is_nested(place: Place) -> bool:
    """Return True if a place is that of a nested tensor."""
    return isinstance(place, dict) and not {"jagged", "nested"}.isdisjoint(place)


def list_names(place: Place) -> list[str]:
    """Return the names of the arrays of a place; nothing for the parts of it that are malformed."""
    if isinstance(place, str):
        return [place]
    return [part for part in expand([place], _list_parts) if isinstance(part, str)]


def _list_parts(place: object) -> list[object]:
    """Return what a place consists of."""
    if isinstance(place, list):
        return place[:1]
    if not isinstance(place, dict):
        return []
    below = place.get("jagged")
    parts = below.values() if isinstance(below, dict) else ()
    return [place.get("tensor"), place.get("packed"), place.get("nested"), *parts]


def read_shape(sizes: Sequence[object], itemsize: int = 1) -> torch.Size:
    """Return a shape of a header; raise ValueError unless a tensor with elements of ``itemsize`` bytes can have it.

    >>> read_shape([3, 2]), read_shape([1 << 40, 0])
    (torch.Size([3, 2]), torch.Size([1099511627776, 0]))
    """
    nbytes = itemsize
    dims: list[int] = []
    for size in sizes:
        if type(size) is not int or not 0 <= size < _TOO_LARGE:
            raise ValueError(f"{size!r:.100} is not a size")
        nbytes *= size or 1  # a size of 0 would hide that the other ones are impossible
        dims.append(size)
    shape = torch.Size(dims)
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"a shape of {len(shape)} dims")
    if nbytes >= _TOO_LARGE:
        try:
            torch.empty(shape, dtype=torch.uint8, device="meta")
        except RuntimeError as error:
            raise ValueError(f"no tensor has the shape {list(shape)}") from error
        if 0 not in shape:
            raise ValueError(f"no file holds the shape {list(shape)}")
    return shape
