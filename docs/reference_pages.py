"""Hooks of mkdocs: a page of the reference for each class and each group of methods, and links from all pages to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from mkdocs.structure.files import File, Files
from reference_names import GROUPS, ROLE, SPAN, link, list_methods, list_names, list_packages

#: A package of the reference, in its navigation.
PACKAGE = re.compile(r"reference/(td\w*)\.md$")


def make_name(title: str) -> str:
    """Return the name of the page with a title."""
    return title.lower().replace(",", "").replace(" ", "_")


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
    return ROLE.sub(r"`\1`", first)


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


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Hook of mkdocs: list the contents of packages, and link the names in the text; name overviews after their heading."""
    if page.title == "Overview":
        page.meta["title"] = markdown.partition("\n")[0].removeprefix("# ")
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"<!-- Names of (\w+). -->", list_contents, markdown)
    return SPAN.sub(link, markdown)
