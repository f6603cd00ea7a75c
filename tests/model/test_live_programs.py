"""Random programs on collections in a file: after each step, another process loads what a collection in memory has.

A program is a list of steps with drawn arguments. Each step runs on a collection in memory and on the same one in a file. If
memory refuses it, the file must refuse it, too; if the file refuses it, nothing may have changed, except by the part of the step
that ran before (``Step.before``). A new step is a row of ``STEPS``: a name, a function from :class:`Pick` and the collection in
memory to the arguments, and a function that applies them. Arguments are pickled, since other processes run steps, too: this file
is also the program of those processes.

``TD_MODEL_PROGRAMS`` is the number of programs, ``TD_MODEL_SEED`` the seed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import td_core
from td_core import TensorDict, lazy_stack

tensorclass = pytest.importorskip("td_tensorclass")
pytest.importorskip("td_hdf5")
pytest.importorskip("td_zarr")

pytestmark = pytest.mark.once

#: Programs of an ordinary run; ``nox -s model`` runs more.
PROGRAMS = int(os.environ.get("TD_MODEL_PROGRAMS", "100"))
#: The seed; a worker of xdist adds its number.
SEED = int(os.environ.get("TD_MODEL_SEED", "0")) * 1000 + int(
    os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]
)

#: A folder in memory, if the system has one.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

Pose = type(
    "Pose", (tensorclass.TensorClass,), {"__annotations__": {"xy": torch.Tensor}, "__module__": "td_model"}
)
# Pickles find the class in a module that all processes have.
vars(sys.modules.setdefault("td_model", ModuleType("td_model")))["Pose"] = Pose

#: The suffix of each format with its options.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "hdf5": ("h5", {}),
    "hdf5_chunks": ("h5", {"chunks": 1, "compression": "gzip"}),
    "zarr": ("zarr", {}),
    "zarr_chunks": ("zarr", {"chunks": 1}),
}

#: What a file may refuse although memory does not.
REFUSALS = (
    td_core.CodecError,
    td_core.LockedError,
    td_core.StructureError,
    td_core.UnsupportedOperationError,
)


class Pick:
    """Draws arguments of steps."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw

    def one(self, items: Any) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def key(self) -> Any:
        """Draw a key or a key path, which exists or not."""
        return self.one(["a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "c"), "n", "v", "rows", "pose"])

    def held(self, td: Any) -> Any:
        """Draw the key of an entry, mostly one that exists."""
        keys = list(td.keys(True))
        return self.one(keys) if keys and self.one([True, True, True, False]) else self.key()

    def level(self, td: Any) -> Any:
        """Draw the key path of a level that is not part of a larger entry; () is the root."""
        return self.one(list_levels(td))

    def tensor(self, td: Any, size: Any = None) -> torch.Tensor:
        """Draw a leaf of a batch size."""
        shape = (*(td.batch_size if size is None else size), *self.one([(), (2,), (1, 2)]))
        dtype = self.one(
            [torch.float32, torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]
        )
        number = torch.arange(torch.Size(shape).numel()) + self.one(range(5))
        return number.view(shape).to(dtype)

    def value(self, td: Any) -> Any:
        """Draw a value of any kind."""
        size, kind = td.batch_size, self.one(["leaf", "leaf", "level", "value", "rows", "pose", "number"])
        if kind == "level":
            return TensorDict({"a": self.tensor(td), "m": {"c": self.tensor(td)}}, size)
        if kind == "value":
            return self.one(["text", (1, None), ("x", (1.5,))])
        if kind == "rows" and size:
            return lazy_stack([TensorDict({"p": self.tensor(td, size[1:])}, size[1:])] * size[0]).clone()
        if kind == "pose":
            return Pose(xy=self.tensor(td), batch_size=size)
        return self.one([1, 2.5, True]) if kind == "number" else self.tensor(td)

    def index(self, td: Any) -> Any:
        """Draw an index of the first batch dim."""
        count = td.batch_size[0] if td.batch_size else 0
        if not count:
            return self.one([0, ..., ()])
        mask = torch.tensor([self.draw(st.booleans()) for _ in range(count)])
        return self.one(
            [0, -1, slice(1, None), slice(None, None, 2), [0], [count - 1, 0], mask, ..., count + 3]
        )


def list_levels(td: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the key paths of the dense levels of a collection."""
    nested = [(key, child) for key, child in td._children().items() if type(child) is TensorDict]
    return [path, *(found for key, child in nested for found in list_levels(child, (*path, key)))]


def at(td: Any, path: Any) -> Any:
    """Return the entry at a key path; the collection itself for an empty one."""
    return td.get(path) if path else td


def draw_rows(pick: Pick, td: Any) -> Any:
    """Draw an index, and what is written there."""
    index = pick.index(td)
    try:
        rows = td[index].clone()
        rows = rows.apply(torch.zeros_like) if pick.one([True, False]) else rows
    except Exception:  # memory refuses the index, too
        rows = TensorDict({"a": 1.0})
    return index, rows


class Step(NamedTuple):
    """A step: how its arguments are drawn, and how they are applied."""

    draw: Callable[[Pick, Any], tuple[Any, ...]]
    apply: Callable[..., Any]
    #: Whether the structure can change, so that other open collections are opened again.
    changes: bool = True
    #: A call of its own that runs before, and stays if the step is refused; ``apply`` takes its result as the last argument.
    before: Callable[..., Any] | None = None


def pick_leaf(pick: Pick, td: Any) -> Any:
    """Draw the key of a leaf that is in a dense level."""
    levels = list_levels(td)
    keys = [(*p, k) for p in levels for k, c in at(td, p)._children().items() if isinstance(c, torch.Tensor)]
    return pick.one(keys or [("a",)])


def write_leaf(td: Any, key: Any, value: Any) -> None:
    leaf = td[key]
    leaf[...] = value


STEPS: dict[str, Step] = {
    "set": Step(lambda p, td: (p.key(), p.value(td)), lambda td, k, v: td.set(k, v)),
    "set_held": Step(lambda p, td: (p.held(td), p.value(td)), lambda td, k, v: td.__setitem__(k, v)),
    "set_leaf": Step(lambda p, td: (pick_leaf(p, td), p.tensor(td)), lambda td, k, v: td.set(k, v)),
    "set_wrong_shape": Step(lambda p, td: (p.key(), torch.zeros(7, 7)), lambda td, k, v: td.set(k, v)),
    "set_sparse": Step(lambda p, td: (p.key(), p.tensor(td)), lambda td, k, v: td.set(k, v.to_sparse())),
    "set_": Step(lambda p, td: (p.held(td), p.tensor(td)), lambda td, k, v: td.set_(k, v), False),
    "set_inplace": Step(
        lambda p, td: (p.held(td), p.tensor(td)), lambda td, k, v: td.set(k, v, inplace=True)
    ),
    "set_non_tensor": Step(lambda p, td: (p.key(), "new"), lambda td, k, v: td.set_non_tensor(k, v)),
    "setdefault": Step(lambda p, td: (p.held(td), p.value(td)), lambda td, k, v: td.setdefault(k, v)),
    "create_nested": Step(lambda p, td: (p.key(),), lambda td, k: td.create_nested(k)),
    "delete": Step(lambda p, td: (p.held(td),), lambda td, k: td.del_(k)),
    "pop": Step(lambda p, td: (p.held(td),), lambda td, k: td.pop(k)),
    "pop_and_set": Step(
        lambda p, td: (p.held(td), p.key()),
        lambda td, k, n, popped: td.set(n, popped),
        before=lambda td, k, n: td.pop(k),
    ),
    "popitem": Step(lambda p, td: (), lambda td: td.popitem()),
    "clear_level": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).clear()),
    "rename": Step(lambda p, td: (p.held(td), p.key()), lambda td, k, n: td.rename_key_(k, n)),
    "rename_safe": Step(
        lambda p, td: (p.held(td), p.held(td)), lambda td, k, n: td.rename_key_(k, n, safe=True)
    ),
    "flatten": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).flatten_keys(".", inplace=True)),
    "unflatten": Step(
        lambda p, td: (p.level(td),), lambda td, k: at(td, k).unflatten_keys(".", inplace=True)
    ),
    "select": Step(
        lambda p, td: ([p.held(td) for _ in range(3)],),
        lambda td, keys: td.select(*keys, inplace=True, strict=False),
    ),
    "select_strict": Step(
        lambda p, td: (p.held(td), p.held(td)), lambda td, *keys: td.select(*keys, inplace=True)
    ),
    "exclude": Step(
        lambda p, td: (p.held(td), p.held(td)), lambda td, *keys: td.exclude(*keys, inplace=True)
    ),
    "split": Step(lambda p, td: (p.held(td),), lambda td, k: td.split_keys([k], inplace=True)[0]),
    "separate": Step(
        lambda p, td: (p.held(td), p.held(td)), lambda td, *keys: td.separates(*keys, default=None)
    ),
    "filter_empty": Step(lambda p, td: (), lambda td: td.filter_empty_()),
    "update": Step(
        lambda p, td: ({p.key(): p.value(td), p.key(): p.value(td)},), lambda td, items: td.update(items)
    ),
    "update_inplace": Step(
        lambda p, td: ({p.held(td): p.tensor(td), p.key(): p.tensor(td)},),
        lambda td, items: td.update(items, inplace=True),
    ),
    "update_sparse": Step(
        lambda p, td: (p.key(), p.value(td), p.tensor(td)),
        lambda td, k, v, w: td.update({k: v, "bad": w.to_sparse()}),
    ),
    "update_": Step(
        lambda p, td: (pick_leaf(p, td), p.tensor(td)), lambda td, k, v: td.update_({k: v}), False
    ),
    "swap": Step(
        lambda p, td: (pick_leaf(p, td), pick_leaf(p, td)),
        lambda td, k, n: td.update({k: td[n], n: td[k]}) if k != n else None,
    ),
    "names": Step(
        lambda p, td: (
            p.one([["x", "y"], ["x", None], ["t", "u"], None])[: td.batch_dims] if td.batch_dims else None,
        ),
        lambda td, names: setattr(td, "names", names),
    ),
    "names_of_entry": Step(lambda p, td: (p.held(td),), lambda td, k: setattr(td[k], "names", ["z"])),
    "refine_names": Step(lambda p, td: (p.one("xz"),), lambda td, name: td.refine_names(..., name)),
    "rename_dims": Step(lambda p, td: (), lambda td: td.rename_(x="w")),
    "batch_size": Step(
        lambda p, td: (p.level(td), p.one([0, 1, 2])),
        lambda td, k, n: setattr(at(td, k), "batch_size", [*td.batch_size[:n]]),
    ),
    "batch_size_of_entry": Step(lambda p, td: (p.held(td),), lambda td, k: setattr(td[k], "batch_size", [])),
    "auto_batch_size": Step(lambda p, td: (p.one([None, 0, 1]),), lambda td, n: td.auto_batch_size_(n)),
    "auto_device": Step(lambda p, td: (), lambda td: td.auto_device_()),
    "clear_device": Step(lambda p, td: (), lambda td: td.clear_device_()),
    "fill": Step(lambda p, td: (p.held(td), p.one([0, 3])), lambda td, k, v: td.fill_(k, v), False),
    "zero": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).zero_(), False),
    "add": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).add_(1), False),
    "mul": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).mul_(at(td, k).clone()), False),
    "masked_fill": Step(
        lambda p, td: (
            torch.tensor([p.draw(st.booleans()) for _ in range(td.batch_size.numel())]).view(td.shape),
            1,
        ),
        lambda td, mask, v: td.masked_fill_(mask, v),
        False,
    ),
    "apply": Step(lambda p, td: (p.level(td),), lambda td, k: at(td, k).apply_(lambda x: x.zero_()), False),
    "write_rows": Step(draw_rows, lambda td, i, rows: td.__setitem__(i, rows)),
    "write_number": Step(
        lambda p, td: (p.index(td), p.one([0, 1])), lambda td, i, v: td.__setitem__(i, v), False
    ),
    "write_new_rows": Step(
        lambda p, td: (p.index(td), TensorDict({p.one("abk"): p.one([1, 2.0])})),
        lambda td, i, v: td.__setitem__(i, v),
    ),
    "update_at": Step(draw_rows, lambda td, i, rows: td.update_at_(rows, i), False),
    "set_at": Step(
        lambda p, td: (p.held(td), p.index(td), 1), lambda td, k, i, v: td.set_at_(k, v, i), False
    ),
    "write_leaf": Step(lambda p, td: (pick_leaf(p, td), p.one([0, 2])), write_leaf, False),
    "write_leaf_at": Step(
        lambda p, td: (pick_leaf(p, td), p.index(td), p.one([0, 2])),
        lambda td, k, i, v: td[k].__setitem__(i, v),
        False,
    ),
    "flip_rows": Step(lambda p, td: (), lambda td: td.update_(td.flip(0)) if td.batch_dims else None, False),
    "load_state": Step(lambda p, td: (), lambda td: td.load_state_dict(td.clone().state_dict()), False),
    "unlock_entry": Step(lambda p, td: (p.held(td),), lambda td, k: td[k].unlock_()),
}


def describe(td: Any, path: tuple[str, ...] = ()) -> list[Any]:
    """Return what a collection has: kinds, sizes, names, dtypes and elements, in the order of the keys."""
    if isinstance(td, torch.Tensor):
        return [(path, str(td.dtype), tuple(td.shape), td.clone().tolist())]
    kind = (
        "TensorDict" if type(td).__name__ in ("PersistentTensorDict", "ZarrTensorDict") else type(td).__name__
    )
    here: list[Any] = [(path, kind, tuple(td.batch_size), td.names, str(td.device))]
    stacked = td._members_and_dim()
    if stacked is not None:
        here.append(stacked[1])
        return here + [row for i, item in enumerate(stacked[0]) for row in describe(item, (*path, str(i)))]
    if td._is_value:
        return [*here, repr(td._unwrap())]
    return here + [row for key, child in td._children().items() for row in describe(child, (*path, key))]


def show_result(result: Any, td: Any) -> Any:
    """Return what can be compared of the result of a step."""
    if isinstance(result, tuple):
        return [show_result(item, td) for item in result]
    if result is td or type(result).__name__ in ("PersistentTensorDict", "ZarrTensorDict"):
        return None
    return (
        describe(result)
        if hasattr(result, "batch_size") or isinstance(result, torch.Tensor)
        else repr(result)
    )


def run_step(td: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run a step, and return its result, or the error that it raises."""
    step, ran_before = STEPS[name], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if step.before:
                arguments = *arguments, step.before(td, *arguments)
                ran_before = True
            result = step.apply(td, *arguments)
        return None if name in QUIET or result is td else show_result(result, td)
    except Exception as error:
        vars(error)["ran_before"] = ran_before
        return error


def run_part_before(td: Any, name: str, arguments: tuple[Any, ...], error: Any, *path: str) -> Any:
    """Return a copy of a collection after the part of a refused step at a path that ran before the error."""
    before, td = STEPS[name].before, td.clone()
    if before and error.ran_before:
        before(at(td, path), *arguments)
    return td


def describe_values(td: Any) -> list[Any]:
    """Return the rows of values that are not tensors, and of their stacks."""
    rows: list[Any] = describe(td)
    return [row for row in rows if isinstance(row, str) or (isinstance(row, tuple) and "NonTensor" in row[1])]


#: Steps whose result is a collection that is changed.
QUIET = {name for name in STEPS if name not in ("pop", "popitem", "split", "separate")}

#: Steps that write elements alone.
ELEMENTS = [name for name, step in STEPS.items() if not step.changes]

#: Threads that run steps.
THREADS = [ThreadPoolExecutor(1) for _ in range(3)]


def open_file(path: str, how: str = "opened") -> Any:
    """Open a collection for writing; if it is ``"stored"`` or ``"created"``, for writes of elements alone."""
    if how in ("stored", "created"):
        return td_core.open(path, mode="r+")
    return (TensorDict.from_h5 if path.endswith(".h5") else TensorDict.from_zarr)(path, mode="r+")


class Process:
    """Another process that loads files, and runs steps on collections that it has open."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(request, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def stop(self) -> None:
        self.process.communicate()


def serve() -> None:
    """Answer requests: ``load`` a path, ``open`` it, or run a ``step`` on what was opened."""
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    opened: Any = None
    while True:
        try:
            request, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any = None
        if request == "load":
            path, *key = arguments
            try:
                answer = describe(at(td_core.load(path), tuple(key)))
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
        elif request == "open":
            opened = None if arguments[0] is None else open_file(arguments[0])
        else:
            answer = run_step(opened, *arguments)
            if isinstance(answer, Exception):
                error: Any = RuntimeError(f"{type(answer).__name__}: {answer}")
                error.ran_before = vars(answer)["ran_before"]
                answer = error, isinstance(answer, REFUSALS)
            else:
                answer = answer, None
        pickle.dump(answer, output)
        output.flush()


@pytest.fixture(scope="module")
def processes() -> Any:
    """Start a process that reads, and two that write."""
    started = [Process() for _ in range(3)]
    yield started
    for process in started:
        process.stop()


def make_start(pick: Pick) -> Any:
    """Draw the collection with which a program starts."""
    size = pick.one([[3], [2, 2], [3], []])
    td = TensorDict({"a": pick.tensor(None, size), "n": {"b": pick.tensor(None, size)}}, size)
    td["n", "m"] = TensorDict({"c": pick.tensor(td)}, size)
    for key in ("v", "rows", "pose"):
        if pick.one([True, False]):
            value = pick.value(td)
            td[key] = value if not isinstance(value, (int, float)) else pick.tensor(td)
    return td


def create(td: Any, path: str, options: dict[str, Any], how: str) -> Any:
    """Write a collection, and open it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if how == "created":
            opened = td_core.create(td, path, format="hdf5" if path.endswith(".h5") else "zarr", **options)
            opened.update_(td)
            return opened
        opened = (td.to_h5 if path.endswith(".h5") else td.to_zarr)(path, **options)
    return opened if how == "written" else open_file(path, how)


class Program:
    """A collection in memory, the same one in a file, and the processes that use the file."""

    def __init__(self, pick: Pick, name: str, folder: str, processes: list[Process]) -> None:
        self.pick, self.name, self.log = pick, name, list[str]()
        suffix, options = FORMATS[name]
        self.path = f"{folder}/x.{suffix}"
        self.memory = make_start(pick)
        self.reader, *self.writers = processes
        self.how = pick.one(["written", "opened", "opened", "stored", "created"])
        self.live = create(self.memory, self.path, options, self.how)
        self.steps = ELEMENTS if self.how in ("stored", "created") else list(STEPS)
        self.log += [f"{name}, {self.how}", str(self.memory)]
        self.stale = {0, 1}

    def run(self, count: int, several: bool) -> None:
        self.check()
        for _ in range(count):
            if several or self.pick.one([False] * 9 + [True]):
                if self.append():
                    continue
            name = self.pick.one(self.steps)
            try:
                arguments = STEPS[name].draw(self.pick, self.memory)
            except (LookupError, TypeError, td_core.TensorDictError):
                continue  # the collection has nothing for the step
            self.step(name, arguments, self.pick.one([-1, 0, 1]) if several else -1)

    def append(self) -> bool:
        """Append rows to the file now and then, and open it again."""
        if not self.pick.one([False] * 9 + [True]) or not self.memory.batch_dims:
            return False
        rows = self.memory[:1].clone()
        try:
            grown = torch.cat([self.memory, rows])
        except Exception:
            return False
        try:
            td_core.append(rows, self.path)
        except (td_core.TensorDictError, ValueError):
            self.check()
            return False
        self.log.append("append")
        self.memory, self.live, self.stale = grown, open_file(self.path, self.how), {0, 1}
        self.check()
        return True

    def step(self, name: str, arguments: tuple[Any, ...], writer: int) -> None:
        """Run a step in memory, and in this process or another one, and compare."""
        self.log.append(f"{name}{arguments} in process {writer + 1}")
        arguments = pickle.loads(pickle.dumps(arguments))
        trial = self.memory.clone()
        expected = run_step(trial, name, pickle.loads(pickle.dumps(arguments)))
        if writer < 0:
            if -1 in self.stale:
                self.live = open_file(self.path, self.how)
            thread = self.pick.one([None, *THREADS])
            found = (
                thread.submit(run_step, self.live, name, arguments).result()
                if thread
                else run_step(self.live, name, arguments)
            )
            is_refusal = isinstance(found, REFUSALS)
        else:
            if writer in self.stale:
                self.writers[writer].ask("open", self.path)
            found, is_refusal = self.writers[writer].ask("step", name, arguments)
            if is_refusal is None:
                is_refusal = False
        self.stale.discard(writer)
        if isinstance(expected, Exception):
            assert isinstance(found, Exception), f"memory refuses: {expected!r}"
        elif isinstance(found, Exception):
            assert is_refusal, f"it must not raise {found!r}"
        else:
            assert found == expected, "the results differ"
        changes = STEPS[name].changes
        if isinstance(found, Exception):
            trial, changes = run_part_before(self.memory, name, arguments, found), found.ran_before
        # Other collections have changed elements of leaves at once, and changed values when they are opened again.
        if changes or describe_values(trial) != describe_values(self.memory):
            self.stale |= {-1, 0, 1} - {writer}
        self.memory = trial
        self.check(writer < 0)

    def check(self, own: bool = True) -> None:
        """Compare the file, and the open collection, with memory."""
        expected = describe(self.memory)
        assert self.reader.ask("load", self.path) == expected
        if own and -1 not in self.stale:
            assert describe(self.live) == expected, "the open collection differs from the file"


OPTIONS = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
    print_blob=True,
    report_multiple_bugs=False,
)


def run_programs(processes: list[Process], count: int, several: bool) -> None:
    number, last = 0, ""

    @settings(OPTIONS, max_examples=count)
    @given(st.data())
    def run(data: Any) -> None:
        nonlocal number, last
        number += 1
        with tempfile.TemporaryDirectory(dir=FAST) as folder:
            pick = Pick(data.draw)
            program = Program(pick, pick.one(FORMATS), folder, processes)
            try:
                program.run(pick.one(range(4, 10)), several)
            except BaseException:
                last = "\n  ".join([f"program {number} of the seed {SEED}:", *program.log])
                raise
            finally:
                for process in processes[1:]:
                    process.ask("open", None)

    try:
        seed(SEED)(run)()
    finally:
        print(last)


def test_programs_of_one_process_give_what_memory_gives(processes: Any) -> None:
    run_programs(processes, PROGRAMS * 3 // 4, False)


def test_programs_of_three_processes_give_what_memory_gives(processes: Any) -> None:
    run_programs(processes, PROGRAMS // 4, True)


class Track(NamedTuple):
    """The steps of one thread on its level, with what memory answers, and the level before and after each."""

    key: str
    steps: list[tuple[str, tuple[Any, ...]]]
    answers: list[Any]
    levels: list[Any]

    def run(self, live: Any) -> list[Any]:
        """Run the steps until the file refuses more than memory does, and return what the level must have."""
        for number, (name, arguments) in enumerate(self.steps):
            expected, found = self.answers[number], run_step(live[self.key], name, arguments)
            same_part = getattr(expected, "ran_before", None) == getattr(found, "ran_before", None)
            if isinstance(found, REFUSALS) and not same_part:
                return describe(run_part_before(self.levels[number], name, arguments, found))
            if isinstance(expected, Exception):
                assert isinstance(found, Exception), f"{name}{arguments}: memory refuses: {expected!r}"
            else:
                assert found == expected, f"{name}{arguments}: the results differ"
        return describe(self.levels[-1])


def draw_track(pick: Pick, memory: Any, key: str) -> Track:
    """Draw the steps of a thread."""
    track = Track(key, [], [], [memory[key]])
    for _ in range(pick.one(range(2, 6))):
        name = pick.one([name for name in STEPS if "sparse" not in name])  # the file refuses all of these
        try:
            arguments = pickle.loads(pickle.dumps(STEPS[name].draw(pick, memory[key])))
        except (LookupError, TypeError, td_core.TensorDictError):
            continue  # the collection has nothing for the step
        trial = memory.clone()
        answer = run_step(trial[key], name, pickle.loads(pickle.dumps(arguments)))
        if isinstance(answer, Exception):
            trial = run_part_before(memory, name, arguments, answer, key)
        memory = trial
        track.steps.append((name, arguments))
        track.answers.append(answer)
        track.levels.append(memory[key])
    return track


def test_programs_of_threads_at_once_give_what_memory_gives(processes: Any) -> None:
    last: list[Any] = []

    @settings(OPTIONS, max_examples=-(-PROGRAMS // 10))
    @given(st.data())
    def run(data: Any) -> None:
        pick = Pick(data.draw)
        suffix, options = FORMATS[pick.one(FORMATS)]
        start = make_start(pick)
        memory = TensorDict({f"t{i}": start.clone() for i in range(len(THREADS))}, start.batch_size)
        tracks = [draw_track(pick, memory, key) for key in memory.keys()]
        last[:] = [suffix, options, start, *(track.steps for track in tracks)]
        with tempfile.TemporaryDirectory(dir=FAST) as folder:
            path = f"{folder}/x.{suffix}"
            live = create(memory, path, options, pick.one(["written", "opened"]))
            pairs = zip(THREADS, tracks, strict=True)
            runs = [(track.key, thread.submit(track.run, live)) for thread, track in pairs]
            expected = {key: done.result() for key, done in runs}
            assert {key: describe(live[key]) for key in expected} == expected
            assert {key: processes[0].ask("load", path, key) for key in expected} == expected

    try:
        seed(SEED)(run)()
    finally:
        print(*last, sep="\n")


@pytest.mark.parametrize("name", FORMATS)
def test_threads_write_their_rows_and_keys(name: str, tmp_path: Any, processes: Any) -> None:
    memory = TensorDict({"a": torch.zeros(6, 2), "n": {"b": torch.zeros(6, dtype=torch.int64)}}, [6])
    suffix, options = FORMATS[name]
    path = f"{tmp_path}/x.{suffix}"
    live = create(memory, path, options, "written")

    def work(number: int) -> None:
        for i in range(4):
            live["a"][2 * number : 2 * number + 2] = number + i
            live["n", "b"][2 * number] = i
            live[f"k{number}"] = torch.full((6,), i)
            live["n", f"k{number}"] = torch.full((6, i + 1), float(i))
            if i % 2:
                live.rename_key_(f"k{number}", f"r{number}")

    for done in [thread.submit(work, number) for number, thread in enumerate(THREADS)]:
        done.result()
    memory["a"] = torch.tensor([3.0, 3, 4, 4, 5, 5])[:, None].expand(6, 2)
    memory["n", "b"] = torch.tensor([3, 0, 3, 0, 3, 0])
    for number in range(3):
        memory[f"r{number}"] = torch.full((6,), 3)
        memory["n", f"k{number}"] = torch.full((6, 4), 3.0)
    found = processes[0].ask("load", path)
    assert sorted(map(repr, found)) == sorted(map(repr, describe(memory)))


if __name__ == "__main__":
    serve()
