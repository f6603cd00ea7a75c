"""Arrays of opened groups, whose metadata is read again when another thread, process or program has changed it."""

from __future__ import annotations

from collections.abc import Iterable

from td_core.errors import FormatError

from ._array_documents import ArrayInfo, Document, read_array_document
from ._group_header import find_documents, find_old_document, read_root
from ._zarr_objects import Objects


class OpenedArray:
    """An array as it was when its group was opened, and as it is now.

    The metadata is in the root of a group that td has written, and in an object of its own in other groups.
    """

    def __init__(self, objects: Objects, info: ArrayInfo) -> None:
        self.objects, self.info = objects, info
        self._key = f"{info.name}/{'zarr.json' if info.document.get('zarr_format') == 3 else '.zarray'}"
        self._version = None if objects.version is not None else objects.read_version(self._key)
        self._known: tuple[object, ArrayInfo] = objects.root, info

    def find(self) -> ArrayInfo:
        """Return the array as it is now, maybe with more rows than when it was opened; FormatError if it was replaced."""
        objects = self.objects
        if objects.version is None:
            self._follow_foreign()
        else:
            version = objects.read_version()
            if version != objects.version:
                objects.check()
                objects.root, objects.version = read_root(objects), version
            root = objects.root
            if self._known[0] is not root:
                documents = find_documents(objects, root, [self.info.name])
                self._known = root, self._compare(documents[self.info.name])
        return self._known[1]

    def _follow_foreign(self) -> None:
        """Read the metadata of an array of another program again, if its object has changed."""
        self.objects.check()
        version = self.objects.read_version(self._key)
        if version == self._version:
            return
        if self.info.document.get("zarr_format") == 3:
            document = find_documents(self.objects, {}, [self.info.name])[self.info.name]
        else:
            document = find_old_document(self.objects, self.info.name)
        self._known, self._version = (None, self._compare(document)), version

    def _compare(self, document: Document) -> ArrayInfo:
        """Return the array with new metadata; raise FormatError if its elements are not those of the opened array."""
        old, new = self.info, read_array_document(self.info.name, document, self.objects.where)
        grows = len(old.shape) == len(new.shape) and all(a <= b for a, b in zip(old.shape, new.shape))
        if new.document == old.document or not old.nbytes:
            return old
        if grows and (old.dtype, old.logical) == (new.dtype, new.logical) and _strip(old) == _strip(new):
            return new
        raise FormatError(
            f"{self.objects.where}: the array {old.name!r} was replaced since it was opened by one of the shape "
            f"{list(new.shape)} and the dtype {new.logical or new.dtype}: open it again"
        )


def has_changed(objects: Objects) -> bool:
    """Return True if the metadata of a group that td has written has changed since it was read."""
    return objects.version is not None and objects.read_version() != objects.version


def has_replaced_arrays(objects: Objects, arrays: Iterable[ArrayInfo]) -> bool:
    """Return True if one of some arrays was removed or replaced since the metadata of the group was read."""
    if not has_changed(objects):
        return False
    opened = [OpenedArray(objects, info) for info in arrays]
    try:
        for array in opened:
            array.find()
    except FormatError:
        return True
    return False


def _strip(info: ArrayInfo) -> dict[str, object]:
    """Return the metadata of an array that does not change when rows are appended."""
    changing = ("shape", "attributes", "dimension_names", "consolidated_metadata")
    return {key: value for key, value in info.document.items() if key not in changing}
