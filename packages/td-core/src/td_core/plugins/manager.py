"""The plugin manager: selects, imports and registers the installed plugins.

pluggy checks the hook implementations. The manager calls each of them once, at registration. If any part of a plugin is
refused, all its parts are unregistered, so registration is atomic. A broken third-party plugin causes a warning, a
broken plugin of the project an error.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import pluggy

from .._encode.node_kinds import KINDS, NodeKind
from .._encode.value_types import VALUES, LeafSerializer
from .._formats.object_locations import STORES
from .._formats.serializers import SERIALIZERS, Serializer
from .._transforms.pytree import register_kind
from .._tree.coerce import COERCERS, Coercer
from ..errors import FIRST_PARTY, MissingPluginError, PluginError
from . import hookspecs, siblings

__all__ = ["PluginManager", "PluginRecord", "PluginWarning", "Selection", "installed", "manager", "plugins"]

GROUP = "td"


class PluginWarning(UserWarning):
    """A plugin could not be registered, or ``TD_PLUGINS`` names one that is not installed."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """State and origin of one plugin.

    Attributes:
        id: name of its entry point, which ``TD_PLUGINS`` uses.
        distribution: the package that provides it, or None if it was registered manually.
        version: version of that package.
        state: ``"active"``, ``"blocked"`` by ``TD_PLUGINS``, or ``"failed"``.
        reason: why it is not active; empty if it is active.
        hooks: the hooks that it implements.
        seconds: time to import and register it, in seconds.
        entry_point: value of the entry point, such as ``"package.module"``.
    """

    id: str
    distribution: str | None = None
    version: str | None = None
    state: Literal["active", "blocked", "failed"] = "active"
    reason: str = ""
    hooks: tuple[str, ...] = ()
    seconds: float = 0.0
    entry_point: str | None = None

    def __str__(self) -> str:
        where = ""
        if self.distribution is not None:
            where = f" (distribution {self.distribution!r} {self.version}, entry point {self.entry_point!r})"
        return f"plugin {self.id!r}{where}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The plugins that ``TD_PLUGINS`` selects: all, none, only the listed ones, or all except the listed ones.

    >>> Selection.parse("a, b").allows("c"), Selection.parse("-c").allows("c")
    (False, False)
    >>> Selection.parse("").allows("c")
    True
    """

    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse a value of ``TD_PLUGINS``: ``none``, names to select (``a,b``) or names to exclude (``-c``).

        Raises:
            PluginError: names to select and names to exclude are mixed.
        """
        names = [name.strip() for name in text.split(",") if name.strip()]
        if names == ["none"]:
            return cls(only=frozenset())
        without = [name[1:].strip() for name in names if name.startswith("-")]
        if not names or len(without) == len(names):
            return cls(without=frozenset(without))
        if without or "none" in names:
            raise PluginError(
                "TD_PLUGINS is 'none', the plugins to keep ('a,b') or the plugins to leave out ('-c,-d'), "
                f"not a mixture; got {text!r}"
            )
        return cls(only=frozenset(names))

    def allows(self, name: str) -> bool:
        """Return True if the plugin ``name`` is selected."""
        return name not in self.without and (self.only is None or name in self.only)


class PluginManager:
    """The registered plugins, each with a function that removes its additions."""

    def __init__(self, *, trace: bool = False) -> None:
        self.pluggy = pluggy.PluginManager(GROUP)
        self.pluggy.add_hookspecs(hookspecs)
        self.trace = trace
        self._records: dict[str, PluginRecord] = {}
        self._undo: dict[str, ExitStack] = {}

    def records(self) -> list[PluginRecord]:
        """Return the record of every plugin, those of the project first."""
        return sorted(self._records.values(), key=_rank)

    def load(self, found: Iterable[EntryPoint], select: Selection) -> None:
        """Import and register the selected plugins of some entry points.

        Warns:
            PluginWarning: a third-party plugin is broken, or ``select`` names one that is not installed.

        Raises:
            PluginError: a plugin of the project itself is broken.
        """
        points = sorted(((_record_of(point), point) for point in found), key=lambda pair: _rank(pair[0]))
        problems = []
        for record, point in points:
            if not select.allows(record.id):
                self._note(replace(record, state="blocked", reason="TD_PLUGINS leaves it out"))
                continue
            problem = self._load_one(record, point)
            if problem is not None:
                problems.append(problem)
        missing = sorted((select.only or frozenset()) - {record.id for record, _ in points})
        if missing:
            names = ", ".join(repr(record.id) for record, _ in points) or "none"
            problems.append(
                f"TD_PLUGINS names {', '.join(map(repr, missing))}, which is not installed; "
                f"installed: {names}"
            )
        # Warn at the end: a filter may turn the warning into an error, after all other plugins are registered.
        for problem in problems:
            warnings.warn(problem, PluginWarning, stacklevel=2)

    def _load_one(self, record: PluginRecord, point: EntryPoint) -> str | None:
        """Import and register one plugin. Return the text of a warning if it is broken, otherwise None."""
        start = time.perf_counter()
        try:
            plugin = point.load()
            if getattr(getattr(sys.modules.get(point.module), "__spec__", None), "_initializing", False):
                # The plugin module imports td_core before it has defined its hooks.
                raise ImportError(f"no hooks yet in the partially initialized module {point.module!r}")
            self.register(plugin, record, start=start)
        except (Exception, SystemExit) as error:
            # A plugin can raise any error; users who do not need the plugin must not be affected.
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PluginError):
                reason = str(error).removeprefix(str(record)).lstrip(",: ")
            reason = " ".join(reason.split())  # the reason is printed on one line
            failed = replace(record, state="failed", reason=reason, seconds=time.perf_counter() - start)
            if record.id not in self._records:
                self._note(failed)
            else:
                self._records[f"{record.id} of {record.distribution}"] = failed
            if record.distribution in FIRST_PARTY:
                raise PluginError(f"{record} is broken: {reason}; reinstall {record.distribution}") from error
            advice = f"update it, or leave it out with TD_PLUGINS=-{record.id}"
            if "partially initialized module" in reason:
                advice = f"import td_core before any of its modules, or first in its __init__.py; {advice}"
            return f"{record} was not registered: {reason}; {advice}"
        return None

    def register(self, plugin: object, record: PluginRecord, *, start: float | None = None) -> PluginRecord:
        """Register a plugin and all objects that its hooks return, atomically.

        Args:
            plugin: a module or object with hook implementations.
            record: the record of the plugin.
            start: time when its import began, from ``time.perf_counter()``.

        Raises:
            PluginError: the id is taken, or an addition of the plugin is refused; nothing is registered.
        """
        other = self._records.get(record.id)
        if other is not None and other.state == "active":
            raise PluginError(f"the plugin id {record.id!r} is taken by {other}")
        with ExitStack() as undo:
            self._admit(plugin, record)
            undo.callback(self.pluggy.unregister, plugin)
            hooks = tuple(sorted(caller.name for caller in self.pluggy.get_hookcallers(plugin) or ()))
            for hook in _HOOKS:
                if hook not in hooks and callable(getattr(plugin, hook, None)):
                    raise PluginError(f"{record}: {hook}() lacks the decorator @hookimpl")
            for hook in hooks:
                self._apply_additions(hook, plugin, record, undo)
            begun = time.perf_counter() if start is None else start
            record = replace(record, hooks=hooks, seconds=time.perf_counter() - begun)
            self._undo[record.id] = undo.pop_all()
        self._note(record)
        return record

    def _apply_additions(self, hook: str, plugin: object, record: PluginRecord, undo: ExitStack) -> None:
        """Register what one hook returns; ``undo`` gets the functions that remove it."""
        for names, add, remove in self._additions(hook, plugin, record):
            try:
                add()
            except PluginError as error:
                owners = {str(_OWNERS[hook, name]) for name in names if (hook, name) in _OWNERS}
                taken = f"; it belongs to {' and '.join(sorted(owners))}" if owners else ""
                raise PluginError(f"{record}, hook {_signature(hook)}: {error}{taken}") from error
            undo.callback(remove)
            for name in names:
                _OWNERS[hook, name] = record
                undo.callback(_OWNERS.pop, (hook, name))

    def unregister(self, id: str) -> None:
        """Remove an active plugin and all its additions."""
        del self._records[id]
        self._undo.pop(id).close()

    def _admit(self, plugin: object, record: PluginRecord) -> None:
        """Register the hook implementations with pluggy, which checks them."""
        try:
            self.pluggy.register(plugin, name=record.id)
        except (pluggy.PluginValidationError, ValueError) as error:
            # On an error pluggy keeps the plugin and the hooks before the wrong one, so unregister them.
            if self.pluggy.get_plugin(record.id) is plugin:
                self.pluggy.unregister(plugin)
            raise PluginError(f"{record}: {' '.join(str(error).split())}") from error

    def _additions(self, hook: str, plugin: object, record: PluginRecord) -> list[Addition]:
        """Call one hook of this plugin only, check the types of the results, and return them as additions."""
        caller = getattr(self.pluggy.hook, hook)
        left = [hookimpl for hookimpl in caller.get_hookimpls() if hookimpl.plugin is plugin]
        if not caller.has_spec() and not all(item.optionalhook for item in left):
            known = ", ".join(_signature(name) for name in _HOOKS)
            raise PluginError(f"{record} implements the unknown hook {hook}(); the hooks are {known}")
        if hook not in _HOOKS:
            return []
        if any(item.hookwrapper or item.wrapper for item in left):
            raise PluginError(
                f"{record}: {_signature(hook)} has nothing to wrap; implement it without wrapper=True"
            )
        results = [item.function() for item in left]
        try:
            return list(_HOOKS[hook](results, record))
        except PluginError as error:
            raise PluginError(f"{record}, hook {_signature(hook)}: {error}") from error

    def _note(self, record: PluginRecord) -> None:
        self._records[record.id] = record
        distribution = record.distribution
        if distribution is not None:
            MissingPluginError.unavailable.pop(distribution, None)
            if record.state != "active":
                MissingPluginError.unavailable[distribution] = f"installed but not active: {record.reason}"
        if self.trace:
            shown = f": {record.reason}" if record.reason else f", hooks {', '.join(record.hooks) or 'none'}"
            print(f"td: {record} is {record.state}{shown}", file=sys.stderr)


#: The plugin that made each addition, by hook and name. All managers share it, as they share the registries.
_OWNERS: dict[tuple[str, object], PluginRecord] = {}


def _rank(record: PluginRecord) -> tuple[int, str, str]:
    """Return a sort key: plugins of the project first, then by id, so that the order on disk has no effect."""
    distribution = record.distribution or ""
    order = [*FIRST_PARTY, distribution].index(distribution)
    return order, record.id, distribution


def _record_of(point: EntryPoint) -> PluginRecord:
    # Each access to .metadata parses the file again, so read it once.
    metadata: Any = {} if point.dist is None else point.dist.metadata
    name = metadata.get("Name")
    return PluginRecord(
        id=point.name,
        distribution=None if name is None else re.sub(r"[-_.]+", "-", name).lower(),
        version=metadata.get("Version"),
        entry_point=point.value,
    )


#: The names that an addition occupies, a function that adds it, and one that removes it.
Addition = tuple[tuple[object, ...], Callable[[], object], Callable[[], object]]


def _provider(record: PluginRecord) -> str | None:
    return None if record.distribution is None else f"{record.distribution}=={record.version}"


def _kinds(results: list[object], record: PluginRecord) -> Iterator[Addition]:
    for kind in _items(results, NodeKind):
        add = partial(_add_kind, kind, _provider(record))
        yield (kind.tag, kind.type), add, partial(KINDS.remove, kind.tag)


def _add_kind(kind: NodeKind, provider: str | None) -> None:
    KINDS.add(kind, provider=provider)
    register_kind(kind)


def _methods(results: list[object], record: PluginRecord) -> Iterator[Addition]:
    for result in results:
        if isinstance(result, type):
            members = {name: member for name, member in vars(result).items() if not name.startswith("_")}
        elif isinstance(result, Mapping):
            members = dict(result)
        else:
            raise PluginError(
                "expected a class or a mapping of names to members, "
                f"got a {type(result).__name__}: {result!r}"
            )
        for name, member in members.items():
            add = partial(siblings.attach, name, member, record.distribution or record.id)
            yield (name,), add, partial(siblings.detach, name)


def _serializers(results: list[object], record: PluginRecord) -> Iterator[Addition]:
    for serializer in _items(results, Serializer, LeafSerializer):
        if isinstance(serializer, LeafSerializer):
            cls = serializer.type
            names = serializer.tag, f"type {cls}" if isinstance(cls, str) else cls
            add = partial(VALUES.add, serializer, provider=_provider(record))
            yield names, add, partial(VALUES.remove, serializer.tag)
        else:
            name = getattr(serializer, "name", "")
            yield (f"format {name}",), partial(SERIALIZERS.add, serializer), partial(SERIALIZERS.remove, name)


def _coercers(results: list[object], _: PluginRecord) -> Iterator[Addition]:
    for coercer in _items(results, Coercer):
        names = coercer.types if isinstance(coercer.types, tuple) else ()
        yield names, partial(COERCERS.add, coercer), partial(COERCERS.remove, coercer)


def _stores(results: list[object], _: PluginRecord) -> Iterator[Addition]:
    for result in results:
        if not isinstance(result, Mapping):
            raise PluginError(
                f"expected a mapping of schemes to functions, got a {type(result).__name__}: {result!r}"
            )
        for scheme, factory in result.items():
            yield (scheme,), partial(STORES.add, scheme, factory), partial(STORES.remove, scheme)


_HOOKS: dict[str, Callable[[list[object], PluginRecord], Iterator[Addition]]] = {
    "td_node_kinds": _kinds,
    "td_methods": _methods,
    "td_serializers": _serializers,
    "td_coercers": _coercers,
    "td_stores": _stores,
}


def _items(results: list[object], *types: type) -> Iterator[Any]:
    names = " or ".join(cls.__name__ for cls in types)
    for result in results:
        if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
            raise PluginError(f"expected an iterable of {names}, got a {type(result).__name__}: {result!r}")
        for item in result:
            if not isinstance(item, types):
                raise PluginError(f"expected {names}, got a {type(item).__name__}: {item!r}")
            yield item


def _signature(hook: str) -> str:
    spelled = str(inspect.signature(getattr(hookspecs, hook)))
    return hook + spelled.replace("'", "")


manager = PluginManager(trace=os.environ.get("TD_TRACE_PLUGINS", "0") not in ("", "0"))


def load_plugins() -> None:
    """Register the installed plugins that ``TD_PLUGINS`` selects, as the last step of ``import td_core``."""
    manager.load(entry_points(group=GROUP), Selection.parse(os.environ.get("TD_PLUGINS", "")))


def plugins() -> list[PluginRecord]:
    """Return the record of every installed plugin.

    >>> all(plugin.state in ("active", "blocked", "failed") for plugin in plugins())
    True
    """
    return manager.records()


@contextmanager
def installed(
    plugin: object,
    *,
    id: str = "test-plugin",
    distribution: str | None = None,
    version: str = "0",
    if_missing: bool = False,
) -> Iterator[PluginRecord]:
    """Register a plugin during a ``with`` block.

    Args:
        plugin: a module or object with hook implementations.
        id: the id of the plugin during the block.
        distribution: the package that the record names as its provider.
        version: the version of that package.
        if_missing: use an installed plugin with this id instead, if there is one.

    Raises:
        PluginError: an addition of the plugin is refused; nothing stays registered.

    >>> from td_core.spi import hookimpl
    >>> class Shine:
    ...     @hookimpl
    ...     def td_methods(self):
    ...         return {"shine": lambda self: "*" * len(self)}
    >>> with installed(Shine()):
    ...     TensorDict(batch_size=[3]).shine()
    '***'
    >>> hasattr(TensorDict(), "shine")
    False
    """
    present = [record for record in plugins() if record.id == id] if if_missing else []
    if present:
        yield present[0]
        return
    record = manager.register(
        plugin, PluginRecord(id, distribution, None if distribution is None else version)
    )
    try:
        yield record
    finally:
        manager.unregister(record.id)
