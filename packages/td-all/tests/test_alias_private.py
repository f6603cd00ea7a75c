"""Private names of tensordict, and private methods of collections, that programs of others use. Each test is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ALIAS = """
import torch, td
td.install_as_tensordict()
from tensordict import *
data = TensorDict(a=torch.zeros(3), n={"b": torch.arange(3)}, s="x", batch_size=[3], names=["t"])
rows = lazy_stack([TensorDict(a=torch.zeros(2), n={"b": torch.ones(1)}), TensorDict(a=torch.zeros(3), n={"b": torch.ones(1)})])
params = TensorDictParams(TensorDict(w=torch.ones(2)))
"""


def evaluate(expressions: list[str], cwd: Path, first: str = "") -> list[str]:
    """Evaluate expressions under the alias in one process; return what each prints, or the class and text of its error."""
    code = f"""{ALIAS}{first}
for expression in {expressions!r}:
    try:
        print(repr(eval(expression)).replace(chr(10), " "))
    except Exception as error:
        print(type(error).__name__ + ":", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FUNCTIONS = [
    ("list(_zip_strict([1], [2]))", "[(1, 2)]"),
    ("list(_zip_strict([1], [2, 3]))", "ValueError: zip() argument 2 is longer than argument 1"),
    (
        "[_unravel_key_to_tuple(k) for k in ('a', ('a', ('b',)), (), 3, ('a', 0))]",
        "[('a',), ('a', 'b'), (), (), ()]",
    ),
    (
        "[unravel_key_to_tuple(k) for k in ('a', ('a', ('b',)), (), 3, ('a', 0))]",
        "[('a',), ('a', 'b'), (), (), ()]",
    ),
    ("[_C.unravel_keys(k) for k in ('a', ('a',), ('a', ('b',)), ('a', 0))]", "['a', 'a', ('a', 'b'), ()]"),
    ("_getitem_batch_size(torch.Size([3, 4]), 0)", "torch.Size([4])"),
    ("_getitem_batch_size(torch.Size([3, 4]), (slice(None), None))", "torch.Size([3, 1, 4])"),
    ("_getitem_batch_size(torch.Size([3, 4]), torch.ones(3, 4, dtype=torch.bool))", "torch.Size([12])"),
    ("_maybe_correct_neg_dim(-1, torch.Size([3, 4]))", "1"),
    ("_maybe_correct_neg_dim(1, None, 2)", "1"),
    (
        "_maybe_correct_neg_dim(2, torch.Size([3, 4]))",
        "IndexError: the dim 2 is out of range: there are 2 batch dims",
    ),
    ("_maybe_correct_neg_dim(-3, None, 2)", "IndexError: the dim -3 is out of range: there are 2 batch dims"),
    ("_shape(torch.zeros(2, 3)), _shape(data)", "(torch.Size([2, 3]), torch.Size([3]))"),
    ("_shape(nested)", "torch.Size([2, -1, 3])"),
    ("_shape(nested, nested_shape=True)", "tensor([[2, 3],         [4, 3]])"),
    (
        "[_is_non_tensor(c) for c in (NonTensorData, NonTensorStack, TensorDict, str)]",
        "[True, True, False, False]",
    ),
    (
        "[_is_tensorclass(c) for c in (NonTensorData, TensorClass, TensorDict, str)]",
        "[True, True, False, False]",
    ),
    (
        "[is_seq_of_nested_key(k) for k in (['a', ('b', 'c')], [], [1], [('a', 1)])]",
        "[True, True, False, False]",
    ),
    ("logger", "<Logger tensordict (WARNING)>"),
    ("[_default_is_leaf(c) for c in (torch.Tensor, TensorDict, NonTensorData)]", "[True, False, False]"),
    ("[_is_leaf_nontensor(c) for c in (torch.Tensor, TensorDict, NonTensorData)]", "[True, False, True]"),
    (
        "[isinstance(x, _ACCEPTED_CLASSES) for x in (torch.zeros(1), data, rows, 3)]",
        "[True, True, True, False]",
    ),
    ("_add_suffix(('a', 'b'), '_x'), Buffer is td.Buffer", "(('a', 'b_x'), True)"),
    ("TensorCollection is td.TensorCollection, PYTREE.__name__", "(True, 'tensordict._pytree')"),
]

MEMBERS = [
    ("data._get_str('a', None)", "tensor([0., 0., 0.])"),
    ("data._get_str('z', None), data._get_str('z', default=5)", "(None, 5)"),
    ("data._get_str('z', NO_DEFAULT)", "KeyPathError: key 'z' not found in TensorDict: existing keys: ['a', 'n', 's']"),
    ("type(data._get_str('s', None)).__name__", "'NonTensorData'"),
    ("rows._get_str('n', None)['b'].shape", "torch.Size([2, 1])"),
    ("data.clone()._set_str('q', torch.ones(3), validated=True, inplace=False)['q']", "tensor([1., 1., 1.])"),
    ("(c := data.clone(), a := c['a'], c._set_str('a', a + 1, validated=True, inplace=True), a)[-1]",
     "tensor([1., 1., 1.])"),
    ("data.lock_().clone().lock_()._set_str('q', torch.ones(3), validated=True, inplace=False)", "LockedError: *"),
    ("data.clone().lock_()._set_str('q', torch.ones(3), validated=True, inplace=False, ignore_lock=True)['q']",
     "tensor([1., 1., 1.])"),
    ("place(data.clone(), inplace=False), place(data.clone().lock_(), inplace=False, ignore_lock=True)", "(['z'], ['z'])"),
    ("(c := data.clone(), n := c['n'], c._set_str('n', TensorDict(b=torch.ones(3)), validated=True, inplace=True), n['b'])[-1]",
     "tensor([1, 1, 1])"),
    ("(p := TensorDictParams(TensorDict(w=torch.ones(2))))._param_td['w'] is p['w'], type(p._param_td).__name__",
     "(True, 'TensorDict')"),
    ("(p := TensorDictParams(TensorDict(w=torch.ones(2))), t := p._param_td, shift(t), p['w'].tolist())[-1]", "[2.0, 2.0]"),
    ("(r := Record._from_tensordict(TensorDict(x=torch.zeros(2), batch_size=[2]))), r.x.tolist(), r.note",
     "(*[0.0, 0.0], None)"),
    ("(t := TensorDict(x=torch.zeros(2)), Record._from_tensordict(t)._tensordict is t)[-1]", "True"),
    ("Record._from_tensordict(TensorDict(x=torch.zeros(2)), {'note': 'n'}).note", "'n'"),
    ("Record._from_tensordict(rows.select('a').rename_key_('a', 'x'))[1].x.shape", "torch.Size([3])"),
    ("Record._from_tensordict(TensorDict(q=torch.zeros(2)))", "UnknownFieldError: Record has no field 'q'*"),
    ("NonTensorData._from_tensordict(TensorDict(batch_size=[2]), {'data': 'a'}).tolist()", "['a', 'a']"),
    ("data._td_dim_names, rows._td_dim_names, data._has_names(), rows._has_names()", "(['t'], None, True, False)"),
    ("data._fast_apply(lambda x: x + 1)['n', 'b']", "tensor([1, 2, 3])"),
    ("data._fast_apply(lambda x, y: x + y, data, propagate_lock=True, checked=True)['n', 'b']", "tensor([0, 2, 4])"),
    ("list(data.select('n')._fast_apply(lambda x: None).keys(True))", "['n']"),
    ("data.select('n')._fast_apply(lambda x: None, filter_empty=True)", "None"),
    ("data._fast_apply(lambda k, x: x if k == ('n', 'b') else None, named=True, nested_keys=True).get('a')", "None"),
    ("data._fast_apply(lambda x: x[0], batch_size=[]).batch_size", "torch.Size([])"),
    ("rows._fast_apply(lambda x: x + 1)[0]['a']", "tensor([1., 1.])"),
    ("params._fast_apply(lambda x: x.data + 1)['w']", "*[2., 2.]*"),
    ("(data._apply_nest(lambda k, x: seen.append(k), named=True, nested_keys=True, prefix=('p',)), seen)[1]",
     "[('p', 'a'), ('p', 'n', 'b')]"),
    ("data._apply_nest(lambda x: x.clone(), batch_size=[3], call_on_nested=True, filter_empty=False)['n', 'b']",
     "tensor([0, 1, 2])"),
    ("data._get_sub_tensordict(0)['n', 'b'], data._get_sub_tensordict(slice(0, 2)).batch_size",
     "(tensor(0), torch.Size([2]))"),
    ("rows._get_sub_tensordict(1)['a'].shape", "torch.Size([3])"),
    ("TensorDict(a=torch.zeros(2, 3), batch_size=[2])._stack_onto_([TensorDict(a=torch.ones(3))] * 2, 0)['a'].sum()",
     "tensor(6.)"),
    ("data._sync_all()", "None"),
    ("rows._has_exclusive_keys, data._has_exclusive_keys", "(False, False)"),
    ("lazy_stack([TensorDict(a=1), TensorDict(b=1)])._has_exclusive_keys", "True"),
    ("TensorDict._new_unsafe({'a': {'b': torch.ones(2)}}, batch_size=[2], names=['t'], lock=True)",
     "TensorDict(batch_size=[2], fields={a: {b: f32[]}})"),
    ("TensorDict._new_unsafe(a=torch.ones(2))['a']", "tensor([1., 1.])"),
    ("isinstance(NonTensorStack('a', 'b'), LazyStackedTensorDict), issubclass(NonTensorStack, LazyStackedTensorDict)",
     "(True, True)"),
    ("isinstance(data, LazyStackedTensorDict), isinstance(rows, LazyStackedTensorDict)", "(False, True)"),
    ("lazy_stack([TensorDict(s='a'), TensorDict(s='b')])['s']", "LinkedList(['a', 'b'])"),
    ("torch.cat([lazy_stack([data[0], data[1]]), lazy_stack([data[2]])])['s']", "LinkedList(['x', 'x', 'x'])"),
]  # fmt: skip

VIEWS = [
    ("list(tree.keys(True, True, is_leaf=A))", "['l', ('r', 'a'), ('r', 'n', 'b')]"),
    ("[key for key, _ in tree.items(True, True, is_leaf=A)]",
     "['l', ('r', '0', 'a'), ('r', '0', 'n', 'b'), ('r', '1', 'a'), ('r', '1', 'n', 'b')]"),
    ("[list(x.shape) for x in tree.values(True, True, is_leaf=A)]", "[[2], [2], [1], [3], [1]]"),
    ("[list(x.shape) for x in rows.values(True, True, is_leaf=A)]", "[[2], [1], [3], [1]]"),
    ("[list(x.shape) for x in params.values(True, True, is_leaf=A)]", "[[2]]"),
    ("tree._fast_apply(lambda x: x + 1, is_leaf=A)['r'][1]['a']", "tensor([1., 1., 1.])"),
    ("list(tree.keys()), [type(x).__name__ for x in tree.values()]",
     "(['l', 'r', 's'], ['Tensor', 'LazyStackedTensorDict', 'NonTensorData'])"),
]  # fmt: skip

IMPORTS = """
from tensordict import _C, _pytree as PYTREE
from tensordict._tensorcollection import TensorCollection
from tensordict.base import NO_DEFAULT, _ACCEPTED_CLASSES, _default_is_leaf, _is_leaf_nontensor, _NESTED_TENSORS_AS_LISTS as A
from tensordict.nn.distributions.composite import _add_suffix
from tensordict.nn.utils import Buffer
from tensordict.utils import (
    _getitem_batch_size, _is_non_tensor, _is_tensorclass, _maybe_correct_neg_dim, _shape, _unravel_key_to_tuple, _zip_strict,
    is_seq_of_nested_key, logger, unravel_key_to_tuple,
)
nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
seen = []
class Record(TensorClass):
    x: torch.Tensor
    note: str = "default"
def place(t, **options):
    return t._set_str("n", TensorDict(z=torch.ones(3)), validated=True, **options)["n"].sorted_keys
def shift(t):
    with torch.no_grad():
        t += 1
tree = TensorDict(l=torch.zeros(2), r=rows, s="x", batch_size=[2])
"""


@pytest.mark.parametrize("rows", [FUNCTIONS, MEMBERS, VIEWS], ids=["functions", "members", "views"])
def test_private_names_return_what_programs_expect(rows, tmp_path):
    results = evaluate([expression for expression, _ in rows], tmp_path, IMPORTS)
    assert len(results) == len(rows)
    for (expression, expected), result in zip(rows, results, strict=True):
        start, _, end = expected.partition("*")
        same = (
            result == expected
            if "*" not in expected
            else result.startswith(start) and end.strip("*") in result
        )
        assert same, (expression, result)


def test_exclude_td_from_pytree_makes_collections_leaves(tmp_path):
    first = """
from tensordict.nn.functional_modules import _exclude_td_from_pytree
from torch.utils._pytree import tree_leaves
class Mine(TensorDict): pass
def count(): return [len(tree_leaves(x)) for x in (data, rows, params, Mine(a=torch.ones(1), b=torch.ones(1)), [data])]
switch = _exclude_td_from_pytree()
def nest():
    with _exclude_td_from_pytree(), _exclude_td_from_pytree():
        inside = count()
    return inside, count()
"""
    expressions = [
        "nest()",
        "switch.set() or count()",
        "switch.unset() or count()",
        "switch.unset() or count()",
    ]
    plain = "[2, 4, 1, 2, 2]"
    assert evaluate(["count()", *expressions], tmp_path, first) == [
        plain, f"([1, 1, 1, 1, 1], {plain})", "[1, 1, 1, 1, 1]", plain, plain,
    ]  # fmt: skip


ABSENT = {
    "tensordict.to_safetensors": "td-safetensors",
    "tensordict.from_safetensors": "td-safetensors",
    "tensordict.from_h5": "td-hdf5",
    "tensordict.base.from_h5": "td-hdf5",
    "tensordict.from_zarr": "td-zarr",
    "tensordict.from_arrow": "td-arrow",
    "tensordict.to_arrow": "td-arrow",
    "tensordict.from_pandas": "td-arrow",
    "tensordict.from_parquet": "td-arrow",
    "tensordict.from_csv": "td-arrow",
    "tensordict.from_json": "td-arrow",
    "tensordict.PersistentTensorDict": "td-hdf5",
    "tensordict.TensorDictStore": "td-redis",
    "tensordict.store.LazyStackedTensorDictStore": "td-redis",
    "tensordict.persistent.PersistentTensorDict": "td-hdf5",
}


def test_name_of_missing_package_imports_and_names_it_when_used(tmp_path):
    first = """
import sys
from importlib import import_module
sys.modules.update(td_safetensors=None, td_hdf5=None, td_zarr=None, td_arrow=None, td_redis=None)
for name, module in [*sys.modules.items()]:  # the names that the star import has found
    if name == "td._persistent_names":
        del sys.modules[name]
    elif name.partition(".")[0] == "tensordict":
        [vars(module).pop(each, None) for each in module.__all__]
def find(name):
    module, _, item = name.rpartition(".")
    return getattr(import_module(module), item)
"""
    for use in ("('x')", ".from_dict({}, 'x')"):
        results = evaluate([f"find({name!r}){use}" for name in ABSENT], tmp_path, first)
        assert results == [
            f"MissingPluginError: {name} is provided by the package {package!r}, which is not installed: "
            f"pip install ./packages/td-store ./packages/{package} in a checkout of td"
            for name, package in ABSENT.items()
        ]
    names = [f"isinstance(data, find({name!r})), find({name!r}).__name__" for name in ABSENT]
    assert evaluate(names, tmp_path, first) == [f"(False, {name.rpartition('.')[2]!r})" for name in ABSENT]


@pytest.mark.parametrize(
    ("call", "instead"),
    [("asend(pipe=1)", "isend(return_early=True)"), ("arecv(1)", "irecv(return_premature=True)")],
)
def test_transport_of_tensordict_raises_naming_what_to_use(call, instead, tmp_path):
    name = call.partition("(")[0]
    assert evaluate([f"data.{call}", f"LazyStackedTensorDict(data).{call}"], tmp_path) == [
        f"UnsupportedOperationError: {kind}.{name}() needs UCX, which td does not have: {instead} of td-distributed returns "
        "handles that can be awaited, and td_distributed.spi packs a collection for another transport"
        for kind in ("TensorDict", "LazyStackedTensorDict")
    ]


LACKING = {
    "from tensordict import _ucxx": "tensordict._ucxx",
    "import tensordict.tabular": "tensordict.tabular",
}


def test_import_name_td_does_not_have_raises(tmp_path):
    results = evaluate([f"exec({line!r})" for line in LACKING], tmp_path)
    for name, result in zip(LACKING.values(), results, strict=True):
        assert result.startswith(
            f"ImportError: {name} is not provided by td, which stands in for tensordict here (td.install_as_tensordict())"
        )


def test_private_members_exist_under_the_alias_only():
    code = """
import td
names = ("_fast_apply", "_apply_nest", "_get_str", "_set_str", "_get_sub_tensordict", "_stack_onto_", "_sync_all",
         "_has_names", "_td_dim_names", "_new_unsafe", "_has_exclusive_keys", "_from_tensordict", "_param_td", "_consolidated")
classes = (td.TensorDict, td.LazyStackedTensorDict, td.TensorClass, td.NonTensorData, td.TensorDictParams)
print([name for name in names for cls in classes if hasattr(cls, name)])
print(issubclass(td.NonTensorStack, td.LazyStackedTensorDict), issubclass(td.TensorDict, __import__("typing").Mapping))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nFalse False\n"
