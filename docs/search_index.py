"""Hook of mkdocs: check that the search finds every method, once, under a short title."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

#: What the title of an entry of the reference has after the name, such as "property".
LABELS = re.compile(r"(\s+<code>[\w-]+</code>)+$")
#: The place of a member of a class.
MEMBER = re.compile(r"^reference/.*#\w+\.(?P<cls>[A-Z]\w*)\.(?P<name>\w+)$")
COLLECTION = "#td_core.TensorDict."


def check_names(entries: list[dict[str, str]]) -> None:
    """Raise a ValueError if a public name of collections has no entry."""
    public = {name for name in dir(import_module("td_core").TensorDict) if not name.startswith("_")}
    missing = public - {entry["location"].rpartition(COLLECTION)[2] for entry in entries}
    if missing:
        raise ValueError(f"the reference has no entry for {sorted(missing)}")


def shorten(entries: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the entries with short titles, without the methods of collections that other classes only inherit."""
    texts = {
        name: entry["text"]
        for entry in entries
        for _, _, name in [entry["location"].partition(COLLECTION)]
        if name
    }
    for entry in entries:
        title = entry["title"]
        if entry["location"].startswith("reference/"):
            title = LABELS.sub("", title)
        member = MEMBER.search(entry["location"])
        if member and member["cls"] != "TensorDict":
            if texts.get(member["name"]) == entry["text"]:
                continue
            title = f"{member['cls']}.{title}"
        yield entry | {"title": title}


def on_post_build(config: Any, **kwargs: Any) -> None:
    """Hook of mkdocs: check and shorten the index that the site searches."""
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    check_names(index["docs"])
    index["docs"] = [*shorten(index["docs"])]
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
