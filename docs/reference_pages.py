"""Hooks of mkdocs: a page of the reference for each class and each group of methods, and links from all pages to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

#: The groups of methods of all collections in the order of the reference: title, and the mixins or the packages that have them.
GROUPS = {
    "Entries": "EntryMixin TensorDict StructureMixin",
    "Attributes": "MetadataMixin",
    "Writing in place": "UpdateMixin",
    "Shapes and rows": "ShapeMixin ElementMixin",
    "Joining": "JoinMixin",
    "Selecting": "SelectMixin",
    "Pointwise operations": "PointwiseMixin",
    "Reductions": "ReductionMixin",
    "Along dims": "AlongMixin",
    "Dtypes, copies and gradients": "DtypeMixin CastingMixin",
    "Devices": "DeviceMixin",
    "Functions of leaves": "ApplyMixin ParallelMixin",
    "Conversion": "ConversionMixin ReprMixin",
    "Modules": "ModuleMixin",
    "Locking": "LockMixin",
    "Saving": "SaveMixin td-memmap td-safetensors td-hdf5 td-zarr td-redis",
    "Tables": "td-arrow",
    "Values": "td-tensorclass",
    "Communication": "td-distributed",
}
#: Names of methods that mean something else in a text, such as a variable or a type, unless they are called.
AMBIGUOUS = {
    "bool", "bytes", "data", "device", "dim", "double", "dtype", "float", "get", "grad", "half", "int", "names", "open", "set",
    "shape", "size", "td", "type", "depth", "attrs", "map", "mod", "copy", "any", "all", "max", "min", "sum",
}  # fmt: skip
#: A package of the reference, in its navigation.
PACKAGE = re.compile(r"reference/(td\w*)\.md$")
#: A code span, or a fence, heading or link, in which no code span is replaced.
SPAN = re.compile(
    r"(?ms)^ *```.*?^ *```|^#[^\n]*|\[[^]\n]*\]\([^)]*\)|`(?:data\.)?(?P<name>[\w.]+)(?P<call>\([^`\n]*\))?`"
)


def make_name(title: str) -> str:
    """Return the name of the page with a title."""
    return title.lower().replace(",", "").replace(" ", "_")


@cache
def list_methods() -> dict[str, list[str]]:
    """Return the public methods of collections in each group; ValueError if one is in none."""
    siblings = import_module("td_core.plugins.siblings")
    collection = import_module("td_core").TensorDict
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    places = {owner: title for title, owners in GROUPS.items() for owner in owners.split()}
    for name in sorted(name for name in dir(collection) if not name.startswith("_")):
        owner = next(cls.__name__ for cls in collection.__mro__ if name in vars(cls))
        title = places.get(siblings.METHODS.get(name, owner))
        if title is None:
            raise ValueError(
                f"no group of docs/reference_pages.py has the methods of {owner}, such as {name}"
            )
        groups[title].append(name)
    return groups


@cache
def list_names(package: str) -> dict[str, dict[str, Any]]:
    """Return the public classes, errors, functions and constants of a package, by kind, with what they are."""
    module = import_module(package)
    kinds: dict[str, dict[str, Any]] = {"class": {}, "error": {}, "function": {}}
    for name in getattr(module, "__all__", ()):
        found = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(found) or getattr(found, "__name__", name) != name:
            continue  # a second name of a function has the docstring of the first
        is_error = inspect.isclass(found) and issubclass(found, BaseException)
        kind = "error" if is_error else "class" if inspect.isclass(found) else "function"
        kinds[kind][name] = found
    return kinds


@cache
def find_targets() -> dict[str, str]:
    """Return the place in the reference of each name that a page may have as code."""
    core, *others = (
        [f"{package}.{name}" for name in chain(*list_names(package).values())] for package in list_packages()
    )
    methods = [f"td_core.TensorDict.{name}" for name in chain(*list_methods().values())]
    targets: dict[str, str] = {}
    for place in chain(*reversed(others), methods, core):  # of two places of a name, the last one counts
        full = place.partition(".")[2]
        short = full.removeprefix("TensorDict.")
        words = {place, full, f"td.{full}", short}
        targets |= {f"{word}()": place for word in words}
        targets |= dict.fromkeys(words - AMBIGUOUS, place)
    return targets


def list_packages() -> list[str]:
    """Return the packages that have a page in the reference."""
    pages = Path(__file__).parent.glob("reference/td_*.md")
    packages = sorted(path.stem for path in pages)
    return sorted(packages, key=lambda package: package != "td_core")


def make_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page that the reference gets in addition to the written ones."""
    for title, names in list_methods().items():
        blocks = "\n\n".join(f"::: td_core.TensorDict.{name}" for name in names)
        yield f"reference/collections/{make_name(title)}.md", f"# {title}\n\n{blocks}\n"
    for package in list_packages():
        for name in list_names(package)["class"]:
            options = "    options:\n      heading_level: 1\n"
            if package != "td_core":  # the collections inherit all methods, which have their own pages
                options += "      inherited_members: true\n"
            elif name == "TensorDict":
                options += "      members: []\n"
            yield f"reference/{package}/{name}.md", f"::: {package}.{name}\n{options}"


def on_files(files: Files, config: Any) -> Files:
    """Hook of mkdocs: add the pages of the reference."""
    for path, text in make_pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: Any) -> Any:
    """Hook of mkdocs: put the pages of the reference below their packages in the navigation, and show the version."""
    reference = next(item["Reference"] for item in config.nav if "Reference" in item)
    groups = [{title: f"reference/collections/{make_name(title)}.md"} for title in GROUPS]
    for position, item in enumerate(reference):
        (title, path), *_ = item.items()
        match = PACKAGE.search(path)
        if path.endswith("/collections.md"):
            reference[position] = {title: [{"Overview": path}, *groups]}
        elif match and match[1] in list_packages():
            pages = [{name: f"reference/{match[1]}/{name}.md"} for name in list_names(match[1])["class"]]
            reference[position] = {title: [{"Overview": path}, *pages]} if pages else item
    config.copyright = f"td {metadata.version('td-core')}, MIT license"
    return config


def get_summary(found: Any) -> str:
    """Return the first sentence of a docstring, without links."""
    text = inspect.getdoc(found) if callable(found) else None
    first = (text or "").partition("\n\n")[0].replace("\n", " ").replace("|", "&#124;")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first)


def list_contents(match: re.Match[str]) -> str:
    """Return a table of the classes of a package, and its functions and errors themselves."""
    package = match[1]
    kinds = list_names(package)
    rows = [
        f"| [`{name}`][{package}.{name}] | {get_summary(each)} |" for name, each in kinds["class"].items()
    ]
    table = ["## Classes", "", "| class | what it is |", "|---|---|", *rows, ""] if rows else []
    for title, kind in (("Functions and constants", "function"), ("Errors", "error")):
        if kinds[kind]:
            table += [f"## {title}", "", *(f"::: {package}.{name}\n" for name in kinds[kind])]
    return "\n".join(table)


def link(match: re.Match[str]) -> str:
    """Return a code span as a link to its place in the reference, or as it is if it has none."""
    if not match["name"]:
        return match[0]
    target = find_targets().get(match["name"] + ("()" if match["call"] else ""))
    return match[0] if target is None else f"[{match[0]}][{target}]"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Hook of mkdocs: list the contents of packages, and link the names in the text."""
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"<!-- Names of (\w+). -->", list_contents, markdown)
    return SPAN.sub(link, markdown)
