"""Declarations of the methods that sibling packages add to every collection.

A declaration has the full signature, so editors and type checkers see the method even if the package is not installed.
The function in the package documents the arguments. Before the package is registered, access to the method raises
:class:`~td_core.errors.MissingPluginError`, an ``AttributeError``, so ``hasattr`` returns False. Registration replaces
the declaration by the function, so a call has no overhead.
"""
# The bodies are empty, since registration replaces the declarations.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch

from .._missing import describe_missing_package
from ..errors import MissingPluginError, PluginError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, DtypeLike, NestedKey

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work
    from typing_extensions import Self

__all__ = ["DECLARATIONS", "SiblingMethods", "attach", "provided_by"]

F = TypeVar("F")


class Declaration:
    """Placeholder of a method whose package is not registered.

    Attributes:
        distribution: the package that provides the method.
        declared: the declared function, classmethod or property.
        name: the name of the method.
    """

    def __init__(self, distribution: str, declared: Any) -> None:
        self.distribution = distribution
        self.declared = declared
        self.__doc__ = declared.__doc__
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        DECLARATIONS[name] = self

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        cls = owner if owner is not None else type(instance)
        call = "" if isinstance(self.declared, property) else "()"
        message = f"{cls.__name__}.{self.name}{call} is provided by " + describe_missing_package(
            self.distribution
        )
        # torch.compile evaluates hasattr() over a descriptor only when it raises AttributeError itself.
        raise AttributeError(message) if torch.compiler.is_compiling() else MissingPluginError(message)


#: Every declaration, by method name.
DECLARATIONS: dict[str, Declaration] = {}


def provided_by(distribution: str) -> Callable[[F], F]:
    """Return a decorator that declares a method, classmethod or property of the package ``distribution``.

    >>> class Collection:
    ...     @provided_by("td-example")
    ...     def shine(self) -> None:
    ...         '''Shine.'''
    >>> Collection().shine()
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: Collection.shine() is provided by the package 'td-example', which is
    not installed: pip install td-example
    >>> hasattr(Collection(), "shine")
    False
    >>> del DECLARATIONS["shine"]
    """

    def declare(declared: F) -> F:
        return cast(F, Declaration(distribution, declared))

    return declare


def attach(name: str, member: Any, distribution: str) -> Callable[[], None]:
    """Add a function, classmethod or property to every collection, and return a function that removes it.

    Raises PluginError if the name is not public, shadows a member, or is declared for another package or signature.
    """
    declaration = DECLARATIONS.get(name)
    if declaration is not None:
        _check_declared(declaration, member, distribution)
        setattr(SiblingMethods, name, member)
        return lambda: setattr(SiblingMethods, name, declaration)
    _check_new(name, member)
    setattr(SiblingMethods, name, member)
    return lambda: delattr(SiblingMethods, name)


def _check_declared(declaration: Declaration, member: Any, distribution: str) -> None:
    name = declaration.name
    if distribution != declaration.distribution:
        raise PluginError(
            f"the method {name!r} is declared for the package {declaration.distribution!r} alone"
        )
    if vars(SiblingMethods)[name] is not declaration:
        raise PluginError(f"the method {name!r} is already provided")
    wanted, result = _shape(declaration.declared), _shape(member)
    if wanted != result:
        raise PluginError(
            f"the method {name!r} is declared as {_spell(declaration.declared)}; got {_spell(member)}"
        )


def _check_new(name: str, member: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
        raise PluginError(f"the method name {name!r} is not a public Python identifier")
    if not isinstance(member, (classmethod, staticmethod, property)) and not inspect.isfunction(member):
        raise PluginError(
            f"the method {name!r} is a {type(member).__name__}; it must be a function, "
            "classmethod, staticmethod or property"
        )
    for base in dict.fromkeys(base for cls in _with_subclasses(SiblingMethods) for base in cls.__mro__):
        if name in vars(base):
            raise PluginError(f"the method name {name!r} would shadow {base.__qualname__}.{name}")


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


def _shape(member: Any) -> tuple[Any, ...]:
    """Return the parts of a signature that callers depend on: type of member, and name, kind, default of parameters."""
    kind = type(member).__name__ if isinstance(member, (classmethod, staticmethod, property)) else "method"
    parameters = inspect.signature(_function(member)).parameters.values()
    # Ignore the name of the first parameter, self or cls.
    return (
        kind,
        *(
            ("" if i == 0 else parameter.name, parameter.kind, parameter.default)
            for i, parameter in enumerate(parameters)
        ),
    )


def _spell(member: Any) -> str:
    """Format the signature of a member without annotations."""
    kind, *_ = _shape(member)
    signature = inspect.signature(_function(member))
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    spelled = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return spelled if kind == "method" else f"{kind} {spelled}"


class SiblingMethods:
    """Declarations of the methods that td-memmap, td-tensorclass and td-distributed provide."""

    __slots__ = ()

    @provided_by("td-memmap")
    def memmap(
        self,
        prefix: str | Path | None = None,
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
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Self:
        """Save every leaf to a file under ``prefix`` and return a locked, mapped collection; see :func:`td_memmap.memmap`."""

    @provided_by("td-memmap")
    def memmap_(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Self:
        """Write every leaf to a file under ``prefix``, map it in place, and lock the collection.

        The arguments are those of :meth:`memmap`.
        """

    @provided_by("td-memmap")
    def memmap_like(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        durable: bool = False,
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Self:
        """Create sparse files for leaves of the same shapes and dtypes, and return a mapped, locked collection.

        If ``prefix`` has a save of the same structure, its content is kept. The arguments are those of :meth:`memmap`.
        """

    @provided_by("td-memmap")
    @classmethod
    def load_memmap(
        cls,
        prefix: str | Path,
        device: DeviceType | None = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: bool = False,
    ) -> Self:
        """Load the collection saved at ``prefix``, mapped from its files; see :func:`td_memmap.load_memmap`."""

    @provided_by("td-memmap")
    def load_memmap_(
        self,
        prefix: str | Path,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: bool = False,
    ) -> Self:
        """Copy the content of the save at ``prefix`` into this collection, in place, and add missing entries.

        The arguments are those of :meth:`load_memmap`.
        """

    @provided_by("td-memmap")
    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Reload changes that another process made to the save that this collection maps."""

    @provided_by("td-memmap")
    def make_memmap(
        self,
        key: NestedKey,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry of zeros to the save that this collection maps, and return its mapped tensor."""

    @provided_by("td-memmap")
    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``storage`` to the mapped save, and return its mapped tensor."""

    @provided_by("td-memmap")
    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add a copy of ``tensor`` to the save that this collection maps, and return its mapped tensor."""

    @provided_by("td-memmap")
    def is_memmap(self) -> bool:
        """Return True if the collection is mapped to files, and was not unlocked since."""

    @provided_by("td-memmap")  # type: ignore[prop-decorator]
    @property
    def saved_path(self) -> Path:
        """Directory that this collection maps."""

    @provided_by("td-tensorclass")
    def attrs(
        self, *, fields: Sequence[str] = ("device", "dtype", "shape"), num_threads: int | None = None
    ) -> Self:
        """Replace each leaf by a node of its attributes ``fields``, and return the new collection."""

    @provided_by("td-tensorclass")
    def get_non_tensor(self, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
        """Return the value of a non-tensor entry: one value for the batch, or a list with one per batch element."""

    @provided_by("td-tensorclass")
    def set_non_tensor(self, key: NestedKey, value: Any) -> Self:
        """Store one Python value for the whole batch under ``key``, whatever its type."""

    @provided_by("td-tensorclass")
    def is_non_tensor(self, key: NestedKey) -> bool:
        """Return True if ``key`` holds non-tensor data."""

    @provided_by("td-tensorclass")
    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
        """Return the ``(key, node)`` pairs of the non-tensor entries."""

    @provided_by("td-tensorclass")
    def filter_non_tensor_data(self) -> Self:
        """Return a collection without the non-tensor entries of all nodes."""

    @provided_by("td-tensorclass")
    @classmethod
    def from_dataclass(
        cls,
        dataclass: Any,
        *,
        dest_cls: type | None = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        as_tensorclass: bool = False,
        device: DeviceType | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Convert a dataclass instance to a collection of its fields; see :func:`td_tensorclass.from_dataclass`."""

    @provided_by("td-distributed")
    def consolidate(
        self,
        filename: Path | str | None = None,
        *,
        num_threads: int = 0,
        device: DeviceType | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: bool = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
        durable: bool = False,
    ) -> Self:
        """Copy all leaves into one storage and return a collection of views on it; see :func:`td_distributed.consolidate`."""

    @provided_by("td-distributed")
    def is_consolidated(self) -> bool:
        """Return True if the leaves are views on one consolidated storage."""

    @provided_by("td-distributed")
    @classmethod
    def from_consolidated(cls, filename: str | Path) -> Self:
        """Load the collection that :meth:`consolidate` wrote to ``filename``."""

    @provided_by("td-distributed")
    def send(
        self,
        dst: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> None:
        """Send this collection to a process that calls :meth:`recv`; see :func:`td_distributed.send`."""

    @provided_by("td-distributed")
    def recv(
        self,
        src: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> int:
        """Receive a collection that a process sends with :meth:`send` into this collection, in place.

        The arguments are those of :meth:`send`; ``src`` or ``group_src`` is the rank of the sender. The sender may
        refer only to files below ``root``.
        """

    @provided_by("td-distributed")
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> int | list[Work] | None:
        """Send this collection asynchronously, and wait for the end; ``return_early`` returns the handles instead."""

    @provided_by("td-distributed")
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> tuple[int, list[Any]] | list[Any] | None:
        """Receive asynchronously, and wait for the end; ``return_premature`` returns the handles instead."""

    @provided_by("td-distributed")
    def init_remote(
        self,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
    ) -> None:
        """Send structure and content to a process that calls :meth:`from_remote_init`.

        The structure includes the class, so tensordict's argument ``_tensorclass_type`` is not needed.
        """

    @provided_by("td-distributed")
    @classmethod
    def from_remote_init(
        cls,
        src: int,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
        limit: int = 1 << 36,
        *,
        root: str | Path | None = None,
    ) -> Self:
        """Receive and return the collection that the process ``src`` sends with :meth:`init_remote`.

        Both sides refuse more than ``limit`` bytes. A memory-mapped collection below ``root`` is sent as its path.
        """

    @provided_by("td-distributed")
    def broadcast(
        self, src: int, *, group: ProcessGroup | None = None, device: DeviceType | None = None
    ) -> Self:
        """Send the collection of the process ``src`` to all processes and return it on each.

        The structures may differ before the call. The structure includes the class, so tensordict's argument
        ``_tensorclass_type`` is not needed.
        """

    @provided_by("td-distributed")
    def scatter(
        self,
        src: int,
        tensordicts: list[Any] | None = None,
        *,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
    ) -> Self:
        """Send one item of the list ``tensordicts`` of the process ``src`` to each process, and return it there."""

    @provided_by("td-distributed")
    def gather_and_stack(self, dst: int, group: ProcessGroup | None = None) -> Self | None:
        """Stack the collections of all other processes into that of the process ``dst``, in place.

        The process ``dst`` returns the collection, all others return None.
        """

    @provided_by("td-distributed")
    def all_gather(self, *, group: ProcessGroup | None = None) -> list[Any]:
        """Gather the collections of all processes into a list, on every process."""

    @provided_by("td-distributed")
    def all_reduce(
        self,
        op: Any = None,
        *,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> Any:
        """Reduce every leaf over all processes, in place. ``async_op`` returns handles instead of waiting."""

    @provided_by("td-distributed")
    def reduce(
        self,
        dst: int,
        op: Any = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> Any:
        """Reduce every leaf over all processes into the collection of the process ``dst``, in place."""
