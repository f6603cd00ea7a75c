"""Save and load whole collections: the registry of formats, and the functions that dispatch on it.

Core defines no format. A plugin registers a :class:`Serializer`. Saving selects it by name; loading calls ``detect``
of each one on the path. td-memmap registers the default, ``"memmap"``.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, overload

import torch

from ._collection import Core
from ._missing import UNAVAILABLE, describe_missing_package
from ._nodes import as_named
from .errors import FormatError, MissingPluginError, PluginError, TensorDictError
from .plugins.declarations import takes
from .plugins.memmap_methods import MemmapOptions

__all__ = ["DEFAULT_FORMAT", "SERIALIZERS", "SaveMixin", "Serializer", "load", "save"]

DEFAULT_FORMAT = "memmap"
_DEFAULT_PROVIDER = "td-memmap"

F = TypeVar("F", bound=Callable[..., Any])
SelfT = TypeVar("SelfT", bound="SaveMixin")


class Serializer(ABC):
    """A format for whole collections.

    ``save`` and ``load`` declare their options as keyword parameters: any other option raises TypeError
    before they are called.

    Attributes:
        name: the name of the format for ``save(format=...)``.
        needs_path: False for a format that can save without a path.

    >>> class TorchFile(Serializer):
    ...     name = "torch-file"
    ...
    ...     def save(self, data, path, *, legacy=False):
    ...         torch.save(data.to_dict(), path, _use_new_zipfile_serialization=not legacy)
    ...         return data
    ...
    ...     def load(self, path):
    ...         return TensorDict(torch.load(path))
    ...
    ...     def detect(self, path):
    ...         return path.suffix == ".pt"
    >>> TorchFile().detect(Path("a.pt"))
    True
    """

    name: ClassVar[str]
    needs_path: ClassVar[bool] = True

    @abstractmethod
    def save(self, data: Any, path: Any, *args: Any, **options: Any) -> Any:
        """Write ``data`` to ``path``; return ``data``, a mapped copy or a future."""

    @abstractmethod
    def load(self, path: Any, *args: Any, **options: Any) -> Any:
        """Load the collection at ``path``."""

    def load_as(self, cls: type, path: Any, **options: Any) -> Any:
        """Load the collection at ``path`` as an instance of ``cls``, if that class has declared entries.

        Raises:
            StructureError: the entries do not match the declarations of the class.
        """
        return as_named(cls, self.load(path, **options), f"what is saved at {path}")

    @abstractmethod
    def detect(self, path: Path) -> bool:
        """Return True if ``path`` holds a save of this format; do not raise for other formats."""

    def load_(self, data: Any, path: Any, **options: Any) -> Any:
        """Copy the save at ``path`` into ``data``, in place, add missing entries, and return ``data``."""
        with torch.no_grad():  # loaded tensors have no autograd graph
            return data.update(self.load(path, **options), inplace=True)


class Serializers:
    """Registry of formats by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Serializer] = {}

    def add(self, serializer: Serializer) -> None:
        """Register a format, or raise PluginError if its name is taken or missing."""
        name = getattr(serializer, "name", None)
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"the serializer {serializer!r} has no name: set the class attribute 'name'; got {name!r}"
            )
        if name in self._by_name:
            raise PluginError(f"the format {name!r} is taken by {self._by_name[name]!r}")
        self._by_name[name] = serializer

    def remove(self, name: str) -> None:
        """Unregister a format."""
        del self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Serializer]:
        return iter(self._by_name.values())

    def for_saving(self, name: str | None) -> Serializer:
        """Return the format ``name`` (None: the default), or raise MissingPluginError if it is not registered."""
        name = DEFAULT_FORMAT if name is None else name
        if name in self._by_name:
            return self._by_name[name]
        if name == DEFAULT_FORMAT:
            names = self._names()
            hint = f"; registered formats, to be named by format=: {names}" if names != "none" else ""
            raise MissingPluginError(
                f"the format {DEFAULT_FORMAT!r} is provided by {describe_missing_package(_DEFAULT_PROVIDER)}{hint}"
            )
        raise MissingPluginError(
            f"no installed package provides the format {name!r}; registered formats: {self._names()}"
        )

    def for_loading(self, path: Path, name: str | None) -> Serializer:
        """Return the format ``name``, or with None the only format whose ``detect`` accepts ``path``.

        Raises FileNotFoundError, MissingPluginError, FormatError if no or several formats match, PluginError if ``detect`` fails.
        """
        if name is not None or not self._by_name:
            return self.for_saving(name)
        if not path.exists():
            raise FileNotFoundError(f"cannot load: there is nothing at {str(path)!r}")
        results = [serializer for serializer in self if _is_recognised(serializer, path)]
        if len(results) == 1:
            return results[0]
        if results:
            names = ", ".join(repr(serializer.name) for serializer in results)
            raise FormatError(f"more than one format recognises {str(path)!r}: pass format=, one of {names}")
        message = f"no registered format recognises {str(path)!r}; registered formats: {self._names()}"
        if DEFAULT_FORMAT not in self:
            message += f"; the format {DEFAULT_FORMAT!r} is provided by {describe_missing_package(_DEFAULT_PROVIDER)}"
            raise MissingPluginError(message)
        raise FormatError(message)

    def _names(self) -> str:
        """Format the names of the registered formats and of inactive packages for a message."""
        idle = ", ".join(repr(name) for name in UNAVAILABLE if name != _DEFAULT_PROVIDER)
        return (", ".join(map(repr, self._by_name)) or "none") + (
            f"; installed but not active: {idle} (python -m td_core plugins says why)" if idle else ""
        )


SERIALIZERS = Serializers()


def _is_recognised(serializer: Serializer, path: Path) -> bool:
    try:
        return bool(serializer.detect(path))
    except (OSError, TensorDictError):
        raise
    except Exception as error:
        # A faulty plugin breaks every load, and the traceback alone does not show how to avoid it.
        raise PluginError(
            f"the format {serializer.name!r} failed to tell whether it recognises {str(path)!r}: "
            f"{type(error).__name__}: {error}; pass format= to leave it out"
        ) from error


def _list_options(method: Callable[..., Any]) -> list[str] | None:
    """Return the options that a method of a serializer declares; None if it accepts any."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    # Skip data and path, which are passed by position.
    return [
        parameter.name
        for parameter in parameters
        if parameter.name not in ("data", "path") and parameter.kind is not parameter.VAR_POSITIONAL
    ]


def _check_options(
    serializer: Serializer,
    method: Callable[..., Any],
    options: Mapping[str, Any],
    instead: Callable[..., Any] | None = None,
) -> None:
    """Raise TypeError for an option that ``method`` does not declare; if it declares ``**options``, check ``instead``."""
    known = _list_options(method)
    if known is None:
        if instead is not None:
            _check_options(serializer, instead, options)
        return
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"the serializer {serializer.name!r} has no option {', '.join(map(repr, unknown))} for "
            f"{method.__name__}(); its options: {', '.join(map(repr, known)) or 'none'}"
        )


def save(data: Core, path: str | Path | None, *, format: str | None = None, **options: Any) -> Any:
    """Save a collection.

    Args:
        data: the collection.
        path: target path; None only for formats that need none.
        format: name of a registered format; None is ``"memmap"``.
        **options: options of the format.

    Returns:
        The result of the format: ``data``, a collection mapped from the files, or a future.

    Raises:
        MissingPluginError: the format is not registered.
        TypeError: the format has no such option.

    >>> save(TensorDict(), "a.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    serializer = SERIALIZERS.for_saving(format)
    if path is None and serializer.needs_path:
        raise TypeError(f"the serializer {serializer.name!r} needs a path to save to; got None")
    _check_options(serializer, serializer.save, options)
    return serializer.save(data, None if path is None else Path(path), **options)


def load(path: str | Path, *, format: str | None = None, **options: Any) -> Any:
    """Load a collection.

    Args:
        path: path of the save.
        format: name of a registered format; None selects the format that recognises ``path``.
        **options: options of the format.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        MissingPluginError: the format is not registered.
        FormatError: no registered format, or more than one, recognises ``path``.
        TypeError: the format has no such option.

    >>> load("missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    return _load(None, Path(path), format, options)


def _load(cls: type | None, path: Path, name: str | None, options: dict[str, Any]) -> Any:
    serializer = SERIALIZERS.for_loading(path, name)
    _check_options(serializer, serializer.load, options)
    return serializer.load(path, **options) if cls is None else serializer.load_as(cls, path, **options)


def _show_options(save: F) -> F:
    """Show the options of ``memmap`` in the signature of ``save``."""
    signature = inspect.signature(save)
    own, _, _, *others = signature.parameters.values()
    parameters = [own, *inspect.signature(MemmapOptions).parameters.values(), *others]
    cast(Any, save).__signature__ = signature.replace(parameters=parameters)
    return save


class SaveMixin(Core):
    """``save`` and ``load`` in any registered format."""

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        @takes(MemmapOptions)
        def save(self: SelfT, options: MemmapOptions) -> SelfT: ...
        @overload
        def save(
            self: SelfT,
            prefix: str | Path | None = None,
            copy_existing: bool = False,
            *,
            format: str | None,
            **options: Any,
        ) -> SelfT: ...

    @_show_options
    def save(
        self: SelfT,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        format: str | None = None,
        **options: Any,
    ) -> SelfT:
        """Save the collection at ``prefix``; see :func:`td_core.save`.

        The options are those of :meth:`memmap` and those of the format. Options of :meth:`memmap` that the format lacks are
        ignored if they have their defaults; other unknown options raise TypeError.
        """
        if copy_existing:
            options["copy_existing"] = copy_existing
        known = _list_options(SERIALIZERS.for_saving(format).save)
        for item in dataclasses.fields(MemmapOptions):
            value = options.get(item.name, item.default)
            if value is None or (value == item.default and known is not None and item.name not in known):
                options.pop(item.name, None)
        saved: SelfT = save(self, prefix, format=format, **options)
        return saved

    dumps = save

    @classmethod
    def load(
        cls: type[SelfT], prefix: str | Path, *args: Any, format: str | None = None, **kwargs: Any
    ) -> SelfT:
        """Load the collection saved at ``prefix``; see :func:`td_core.load`.

        The options ``device`` and ``non_blocking`` can be passed by position. A class with declared entries returns an instance
        of itself, whatever class was saved.
        """
        options = _bind_options(args, kwargs, ("device", "non_blocking"))
        loaded: SelfT = _load(cls, Path(prefix), format, options)
        return loaded

    def load_(self: SelfT, prefix: str | Path, *args: Any, format: str | None = None, **kwargs: Any) -> SelfT:
        """Copy the save at ``prefix`` into this collection, in place; raises as :func:`td_core.load`.

        The option ``robust_key`` can be passed by position.
        """
        path = Path(prefix)
        options = _bind_options(args, kwargs, ("robust_key",))
        serializer = SERIALIZERS.for_loading(path, format)
        # A load_() with **options passes them to load(), so the signature of load() defines the valid options.
        _check_options(serializer, serializer.load_, options, serializer.load)
        serializer.load_(self, path, **options)
        return self


def _bind_options(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Merge positional and keyword options into one dict."""
    if len(args) > len(names):
        raise TypeError(f"at most {len(names)} options by position, {', '.join(names)}; got {len(args)}")
    options = dict(zip(names, args, strict=False))
    twice = options.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"the option {', '.join(map(repr, sorted(twice)))} is given by position and by name")
    return {**options, **kwargs}
