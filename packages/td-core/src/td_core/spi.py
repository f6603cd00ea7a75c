"""The interface of td-core for the authors of kinds, formats and sibling packages.

The names here, and the members of a kind, keep their meaning as long as :data:`VERSION` stays the same. Members of a kind
start with an underscore, so that they cannot be confused with methods for users. Members that are not listed here can change
in any release.

>>> from td_core import spi
>>> spi.VERSION
1
>>> class Plain(TensorDict):
...     pass
>>> all(hasattr(Plain, member) for member in spi.REQUIRED)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._convert.printing import PrintedNode
from ._encode.check_lines import add_check_line, compare_check_line
from ._encode.decode import decode
from ._encode.node_kinds import Encoded, NodeKind, as_named, encode, user_class
from ._encode.records import Layout, Record
from ._encode.value_codec import is_readable, is_same_value, parse_json
from ._encode.value_codec import join as join_value
from ._encode.value_codec import split as split_value
from ._encode.value_types import LeafSerializer, enum_serializer
from ._formats.locations import check_mode
from ._formats.saving import check_whole, save_together
from ._formats.serializers import Serializer, check_same_format
from ._kinds.parameters import map_in_roles
from ._kinds.parameters_saved import list_unusual_roles
from ._kinds.wrapper import Wrapper
from ._plans.index import plan_index
from ._plans.plans import MultiPlan, ShapePlan, as_batch_size
from ._plans.shapes import stack_plan
from ._python.public_names import LazyFunction, lazy_names, make_classmethod, set_module
from ._python.settings import RULES, Switch
from ._torch.arrays import as_tensor
from ._torch.dtypes import SHORT_NAMES, STORABLE, as_dtype
from ._torch.kernels import PLAIN
from ._torch.private import (
    count_users,
    guard_forms,
    is_traced,
    make_nested_view,
    new_object,
    pytree,
    without_torch_function,
)
from ._transforms.pytree import register as register_pytree
from ._tree.backends import Keeper, StorageBackend
from ._tree.buffers import as_bytes
from ._tree.coerce import Coercer, is_foreign
from ._tree.components import JaggedParts, get_parts
from ._tree.defaults import is_aliasing, show_path
from ._tree.devices import as_device, wait_for
from ._tree.dim_names import check_names, name_nodes_below
from ._tree.keys import suggest_keys, unravel_key_to_tuple
from ._tree.locks import check_in_memory, check_unlocked, lock
from ._tree.node import LEAF_KINDS, EntrySchema
from ._tree.node import Core as Node
from ._tree.shared_memory import identify_view
from ._tree.stored_leaves import StoredLeaf, is_stored
from ._tree.walks import expand, visit, walk
from ._writes.row_buffers import check_rows, take_into
from ._writes.run import copy_all
from .plugins.hookspecs import hookimpl
from .typing import Source

__all__ = [
    "LEAF_KINDS", "OVERRIDABLE", "PLAIN", "PROVIDED", "REQUIRED", "RULES", "SHORT_NAMES", "STORABLE", "VERSION", "WRAPPING",
    "Coercer", "Encoded", "EntrySchema", "JaggedParts", "Keeper", "Layout", "LazyFunction", "LeafSerializer", "MultiPlan",
    "Node", "NodeKind", "PrintedNode", "Record", "Serializer", "ShapePlan", "Source", "StorageBackend", "StoredLeaf",
    "Switch", "Wrapper", "add_check_line", "as_batch_size", "as_bytes", "as_device", "as_dtype", "as_named", "as_tensor",
    "check_in_memory", "check_mode", "check_names", "check_regular", "check_rows", "check_same_format", "check_table",
    "check_unlocked", "check_whole", "compare_check_line", "copy_all", "count_users", "decode", "decode_table",
    "describe_table", "dump_table", "encode", "enum_serializer", "expand",
    "get_most_nodes", "get_parts", "guard_forms", "hookimpl", "identify_view", "is_aliasing", "is_foreign",
    "is_readable", "is_same_value", "is_stored", "is_traced", "join_value", "lazy_names", "list_unusual_roles",
    "load_table", "lock", "make_classmethod", "make_dense", "make_nested_view", "make_reporter", "make_table_header",
    "map_in_roles", "name_nodes_below", "new_object", "open_regular", "parse_json", "plan_index", "prune_table", "pytree",
    "refuse_nodes", "register_pytree", "run_command", "run_in_background", "run_parallel", "save_together", "select_keys",
    "set_module", "show_path", "show_size", "split_value", "stack_plan", "suggest_keys", "take_into",
    "unravel_key_to_tuple", "user_class", "visit", "wait_for", "walk", "without_torch_function",
]  # fmt: skip

#: Version of this interface. It increases when a name is removed or changes its meaning.
VERSION = 1

#: The members that a kind must provide: a class that derives from ``TensorDictBase`` defines them. ``TensorDict``,
#: ``Wrapper`` and their subclasses have them.
REQUIRED = {
    "batch_size": "Property: the leading dims that all entries share, as a torch.Size.",
    "device": "Property: the device of every entry, or None if entries may be on different devices.",
    "_names": "Attribute: a tuple with one name or None for each batch dim, or None if no dim has a name.",
    "_children": "Return a mapping of the direct entries in insertion order; it may be the kind's own dict.",
    "_with_children": "Return a new, unlocked node with other entries, and with the metadata that is not given.",
    "_set_child": "Store a checked leaf or node under a key.",
    "_del_child": "Remove an entry, or raise KeyError if it is missing.",
    "_set_batch_size": "Store a checked batch size; td-core then adjusts the dim names.",
    "_set_device": "Store the device without moving the leaves.",
}

#: The members that a kind gets, in addition to all methods for users; a kind calls them.
PROVIDED = {
    "_locked": "Attribute: False, True if the user locked the node, or a true value if a storage backend did.",
    "_lock_parents": "Attribute: weak references to the locked nodes that hold the node.",
    "_backends": "Attribute: the storage backends by name, or None; unlocking the node removes those of siblings.",
    "_inner": "Return the node that holds the state: the wrapped node of a wrapper, otherwise the node itself.",
    "_tree_children": "Return the direct children: the members of a lazy stack, the entries of any other node.",
    "_zip_members": "Pair the nodes that hold the entries (the node, or the members of a lazy stack) with parts of others.",
    "_map_members": "Call a function with the node, or with each member of a lazy stack, and stack the results.",
    "_leaves": "Return every leaf of the tree, in a fixed order.",
    "_flatten_leaves": "Append every leaf of the tree to a list, and return the treedef.",
    "_unflatten": "Return the same tree with other leaves, which have the order of `_flatten_leaves`.",
    "_undo": "Attribute: how a `with` block undoes the last operation, or None.",
    "_index": "Return the result of an index of the batch dims.",
    "_assign": "Write a value into all entries at an index.",
    "_get_writable": "Return an entry, wrapped so that what is set in it is converted as in this node.",
    "_set_path": "Check a value, and store it under a key or key path.",
    "_set_names": "Store checked dim names, in this node and below.",
    "_change_batch_size": "Check that all entries start with a batch size, and store it in this node and below.",
}

#: The members that a kind may override, to be faster or because its entries differ from a plain dict of tensors. The last ones
#: are for nodes that hold a value, or one tensor for the whole batch, and no entries.
OVERRIDABLE = {
    "_get_child": "Return one entry, or raise KeyError; by default from `_children`.",
    "_set_children": "Store several checked entries; by default `_set_child` for each.",
    "_map": "Return the same tree with the result of a function in place of each leaf.",
    "_shallow_copy": "Return new nodes with the same leaves; by default `_map` with the identity.",
    "_flatten_other": "Append the leaves of another node to a list, in the order of this node.",
    "_transform": "Apply the plan of an index or a shape operation to every leaf.",
    "_transform_multi": "Apply a plan that splits every leaf, and return one node for each part.",
    "_join": "Join nodes, of which this is the first, as the plan of torch.stack or torch.cat does.",
    "_get_join_entries": "Return the entries for a join with nodes of other kinds, or raise StructureError.",
    "_stack_lazily": "Build a lazy stack of nodes, of which this is the first.",
    "_with_batch_size": "Return this node, or a copy with a longer batch size that all leaves have.",
    "_check_batch_size": "Raise BatchSizeError unless every entry starts with a batch size.",
    "_schema": "Attribute of the class: an EntrySchema, the entries that the class declares.",
    "_wrap_dense": "Convert a TensorDict to this class, for classmethods such as from_dict.",
    "_of_saved": "Convert a loaded node, maybe of another class, to this class, or raise TypeError.",
    "_print_node": "Return what is printed of the node itself.",
    "_is_value": "Attribute of the class: True if the node has no entries, so that keys and walks do not descend into it.",
    "_unwrap": "Return the result of `parent[key]` for this node, such as the value that it holds.",
    "_as_value": "Wrap a value in a node of this kind.",
    "_plan_writes": "List the writes of a value at an index, after checks of all of them.",
    "_broadcast_to_leaves": "Append, for each leaf, the part of a tensor of the batch that is combined with it.",
    "_check_child": "Raise an error if `_set_child` would refuse a checked value.",
    "_edit_together": "Return a context in which changes of the structure reach a store together.",
    "_index_put": "Write a value at an index, and return the node that the parent stores.",
    "_check_index_put": "Raise an error if the node cannot be written at an index.",
    "_compare": "Compare the value with that of another node, for each element of the batch.",
    "_move_mapped_dim": "Hide the batch dim that the vmap of a level maps over, or note where that vmap will insert its dim.",
    "_keeper": "Attribute: the Keeper that stores the values outside memory, or None.",
    "_take_over": "Take the entries, batch size and names of a result, and return the nodes below that do so; None if it cannot.",
    "_max_batch_size": "Return the longest batch size that `_with_batch_size` accepts, or None for any.",
}

#: The members of a subclass of :class:`Wrapper`, which holds another collection and hands all operations on to it.
WRAPPING = {
    "_tensordict": "Attribute: the collection that holds the entries.",
    "_wrap": "Wrap the result of an operation of that collection.",
    "_wrap_stack": "Wrap a lazy stack of wrapped collections.",
    "_wrap_holder": "Wrap a member of that collection, which is not a new result.",
}


# Lower modules see the common base of the kinds only.
if TYPE_CHECKING:
    from typing import Any

    import torch

    from ._kinds.tensordict import TensorDict
    from .typing import Names

    def make_dense(
        children: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Names | None = None,
        cls: type | None = None,
    ) -> TensorDict:
        """Build a TensorDict, or a node of a subclass, that holds the dict ``children`` itself, without checks."""
        ...
else:
    from ._tree.node import make_dense

# For authors of formats. Imported at first use, since programs that do not save need none of it.
if TYPE_CHECKING:
    from ._encode.inspection import show_size as show_size
    from ._encode.tables import check_table as check_table
    from ._encode.tables import decode_table as decode_table
    from ._encode.tables import describe_table as describe_table
    from ._encode.tables import dump_table as dump_table
    from ._encode.tables import get_most_nodes as get_most_nodes
    from ._encode.tables import load_table as load_table
    from ._encode.tables import make_table_header as make_table_header
    from ._encode.tables import prune_table as prune_table
    from ._encode.tables import refuse_nodes as refuse_nodes
    from ._encode.tables import select_keys as select_keys
    from ._formats.background import make_reporter as make_reporter
    from ._formats.background import run_in_background as run_in_background
    from ._formats.background import run_parallel as run_parallel
    from ._formats.command_line import run_command as run_command
    from ._formats.locations import check_regular as check_regular
    from ._formats.locations import open_regular as open_regular
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "td_core._formats.background": ["make_reporter", "run_in_background", "run_parallel"],
            "td_core._formats.command_line": ["run_command"],
            "td_core._encode.tables": [
                "check_table", "decode_table", "describe_table", "dump_table", "get_most_nodes", "load_table",
                "make_table_header", "prune_table", "refuse_nodes", "select_keys",
            ],
            "td_core._encode.inspection": ["show_size"],
            "td_core._formats.locations": ["check_regular", "open_regular"],
        },
    )[0]  # fmt: skip
