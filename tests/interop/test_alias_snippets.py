"""Short programs that public clients of tensordict contain print the same with tensordict and with td in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SNIPPETS = {
    # TorchRL: a replay buffer on disk whose rows are stacks of members with other shapes and keys.
    "uneven_stack_on_disk": """
stack = lazy_stack([TensorDict(a=torch.ones(4, 2), b=torch.ones(1)), TensorDict(a=torch.ones(3, 2), c={"d": torch.ones(2)})])
def show(data):
    members = (data["x"] if "x" in data.keys() else data).tensordicts
    return [list(data.batch_size), [(sorted(m.keys()), list(m["a"].shape), m["a"].sum().item()) for m in members]]
for make in (lambda: stack, lambda: TensorDict(x=stack, batch_size=[2]), lambda: stack.expand(3, 2)):
    print([show(save(make())) for save in (
        lambda data: data.memmap(folder()), lambda data: data.clone().zero_().memmap_like(folder()),
        lambda data: data.clone().memmap_(folder()), lambda data: TensorDict.load_memmap(save_in(data)),
        lambda data: data.clone().share_memory_(), lambda data: data.memmap())])
""",
    "tensorclass_in_uneven_stack_on_disk": """
@tensorclass
class Step:
    a: torch.Tensor
    name: str
stack = lazy_stack([Step(a=torch.ones(n), name="x") for n in (2, 3)])
saved = stack.memmap(folder())
print(type(saved[0]).__name__, [m.a.tolist() for m in saved.unbind(0)], saved[1].name)
""",
    # tdhook: it writes outputs into the storage of a consolidated collection.
    "structure_of_consolidated": """
data = TensorDict({"x": torch.ones(2), "r": {"y": torch.zeros(4)}, "s": "text"}, batch_size=[]).consolidate()
held = data._consolidated
dtype, shape, start, stop, pad = held["metadata"]["r"]["leaves"]["y"]
print(sorted(held), dtype, list(shape), held["metadata"]["cls"], list(held["metadata"]["leaves"]))
held["storage"][start:stop].view(torch.float32).fill_(3)
print(data["r", "y"].tolist(), hasattr(data.clone(), "_consolidated"), hasattr(TensorDict(), "_consolidated"))
held["metadata"]["r"] = None
print(data._consolidated["metadata"]["r"], data.is_consolidated())
data._consolidated = None
print(data._consolidated)
""",
    "loader_of_members": """
rows = [TensorDict(a=torch.full((2,), i), b={"c": torch.tensor(i)}) for i in range(4)]
batch = LazyStackedTensorDict.maybe_dense_stack(rows)
print(type(batch).__name__, batch["a"].tolist(), batch["b", "c"].tolist(), len(list(batch)))
""",
    # TorchRL: chat templates ask which fields a message has, and texts of ragged stacks are read as lists.
    "messages_of_tensorclass": """
@tensorclass
class Message:
    role: str
    content: str
    calls: str | None = None
@tensorclass
class Turn:
    message: Message | None = None
    note: str | None = None
talk = lazy_stack([Message(role="user", content="a"), Message(role="tool", content="b", calls="f")])
print(talk.tolist(), talk[0].tolist(), talk[1].to_dict())
print(Turn(message=talk[0]).tolist(), Turn().tolist(), TensorDict(x=NonTensorData(None)).tolist(), list(Turn(note="n").tolist()))
""",
    "values_and_nodes_have_no_form": """
@tensorclass
class Text:
    prompt: str | None = None
rows = [TensorDict(s="x", n=TensorDict(q="z"), t=torch.ones(2)), TensorDict(s="y", n=TensorDict(q="w"), t=torch.ones(3))]
texts = lazy_stack([Text(prompt="a"), Text(prompt="b")])
for form in ("as_list", "as_nested_tensor", "as_padded_tensor"):
    for stack in (lazy_stack(rows), lazy_stack([lazy_stack(rows), lazy_stack(rows)])):
        read = [stack.get(key, **{form: True}) for key in ("s", "n", ("n", "q"))]
        print([(type(entry).__name__, list(entry.batch_size), entry.tolist()) for entry in read])
        print(stack.get("zz", 3, **{form: True}))
    print(list(texts.get("prompt", **{form: True})))
print(len(lazy_stack(rows).get("t", as_list=True)), lazy_stack(rows).get("t", as_padded_tensor=True).tolist())
""",
    # tdhook: it takes what is shared as a place for results of other processes.
    "shared_until_unlocked": """
import pickle
from multiprocessing.reduction import ForkingPickler
make = lambda: TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(3)))
for data in (make(), make().share_memory_(), make().consolidate(), lazy_stack([make(), make()])):
    received = pickle.loads(ForkingPickler.dumps(data))
    print(type(data).__name__, received.is_shared(), received.clone().is_shared(), received.select("a").is_shared())
for data in (make(), lazy_stack([make(), make()]), TensorDictParams(make())):
    print(data.share_memory_().is_shared(), data["n"].is_shared(), data.unlock_().is_shared(), data["n"].is_shared())
""",
    "samples_of_composite_without_gradient": """
loc = torch.zeros(3, requires_grad=True)
params = TensorDict(a=TensorDict(loc=loc, scale=torch.ones(3)))
module = nn.ProbabilisticTensorDictModule(["params"], ["a"], distribution_class=nn.CompositeDistribution,
    distribution_kwargs={"distribution_map": {"a": Normal}}, default_interaction_type="random")
dist = module.get_dist(TensorDict(params=params))
dist.log_prob(module(TensorDict(params=params)).select("a"))["a_log_prob"].sum().backward()
print(dist.has_rsample, bool(loc.grad.any()), dist.rsample()["a"].requires_grad)
""",
    "keywords_of_distribution_change_later": """
kwargs = {"scale": torch.ones(1)}
module = nn.ProbabilisticTensorDictModule(["loc"], ["x"], distribution_class=Normal, distribution_kwargs=kwargs)
module.distribution_kwargs["scale"] = torch.full((1,), 5.0)
print(module.get_dist(TensorDict(loc=torch.zeros(1))), len(list(module.buffers())))
print(list(TensorDict.from_module(module).keys(True)))
kwargs.update(scale=torch.full((1,), 7.0))
print(module.get_dist(TensorDict(loc=torch.zeros(1))).scale)
""",
    "deterministic_value_of_transformed_distribution": """
for cls in (TransformedDistribution, lambda *args: Independent(TransformedDistribution(*args), 1)):
    for estimate in (1000, 10):
        torch.manual_seed(0)
        module = nn.ProbabilisticTensorDictModule(["loc", "scale"], ["x"], n_empirical_estimate=estimate,
            distribution_class=lambda loc, scale: cls(Normal(loc, scale), [ExpTransform()]))
        print(module(TensorDict(loc=torch.zeros(2), scale=torch.ones(2)))["x"], torch.randn(1))
""",
    "sequence_draws_earlier_samples_again": """
def normal(names, key, kind):
    return nn.ProbabilisticTensorDictModule(names, [key], distribution_class=Normal, default_interaction_type=kind)
for kind in ("deterministic", "random"):
    for composite in (True, False):
        torch.manual_seed(0)
        seq = nn.ProbabilisticTensorDictSequential(
            nn.TensorDictModule(lambda x: (x, x), ["a"], ["loc", "scale"]), normal(["loc", "scale"], "x", kind),
            nn.TensorDictModule(lambda x: (x, torch.ones_like(x)), ["x"], ["loc2", "scale2"]),
            normal({"loc": "loc2", "scale": "scale2"}, "y", kind), return_composite=composite)
        data = TensorDict(a=torch.ones(2), x=torch.full((2,), 5.0), y=torch.full((2,), 4.0))
        score = seq.log_prob(data)
        print([score] if isinstance(score, torch.Tensor) else [score[key] for key in sorted(score.keys())], data["x"])
        seq.get_dist_params(data)
        print(data["x"], data["loc2"])
""",
    "values_that_fit_a_delta_loosely": """
at = torch.zeros(3, 2)
print(Delta(at, atol=torch.full((2,), 0.1)).log_prob(at + 0.05), Delta(at + 1, rtol=torch.ones(3, 1), atol=0.0).log_prob(at + 1))
print(Delta(torch.zeros(3, 1)).log_prob(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])))
print(Delta(at, batch_shape=(3,)).log_prob(at).shape, Delta(torch.zeros(3), batch_shape=(5, 3), event_shape=()).sample().shape)
""",
    "density_of_truncated_normal_next_to_its_interval": """
dist = TruncatedNormal(torch.zeros(3), torch.ones(3), -1.0, 1.0, validate_args=False)
print(dist.log_prob(torch.tensor([1.0001, -2.0, 0.5])))
""",
    "keys_that_a_program_appends_to": """
module = nn.TensorDictModule(lambda x, y: (x + y, x - y), ["x"], ["sum"])
module.in_keys.append("y")
module.out_keys += ["difference"]
module.out_keys.append("rest")
module.out_keys.pop()
result = module(TensorDict(x=torch.ones(1), y=torch.ones(1)))
print(module.in_keys, module.out_keys, result["sum"], result["difference"])
class Reads(nn.TensorDictModuleBase):
    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["a"], []
        self.out_keys.append("b")
    @nn.dispatch
    def forward(self, tensordict):
        return tensordict.set("b", tensordict["a"])
print(Reads().out_keys, Reads()(torch.ones(1)))
wrapper = nn.TensorDictModuleWrapper(nn.TensorDictModule(abs, ["x"], ["y"]))
wrapper.out_keys = ["z"]
print(wrapper.td_module.out_keys, wrapper(TensorDict(x=torch.ones(1)))["z"])
""",
    "switches_of_worker_threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    def read():
        return [nn.interaction_type(), nn.skip_existing(), nn.composite_lp_aggregate(), lazy_legacy(), list_to_stack()]
    print(pool.submit(read).result())
    with nn.set_interaction_type("mean"), nn.set_skip_existing(True), nn.set_composite_lp_aggregate(True):
        with set_lazy_legacy(True), set_list_to_stack(False):
            print(pool.submit(read).result(), read())
            with nn.set_interaction_type("mode", thread_local=True):
                print(pool.submit(read).result(), read())
    print(pool.submit(read).result())
    set_lazy_legacy(True).set()
    print(pool.submit(read).result())
    set_lazy_legacy(False).set()
""",
    "inputs_of_dispatch_that_are_not_tensors": """
@nn.dispatch(source=["a", "b"], dest=["size"])
def measure(tensordict):
    return tensordict.set("size", torch.zeros((*tensordict.batch_size, 1)))
for other in ("text", None, [1, 2, 3], ["x", "y", "z"], 3, {"c": torch.zeros(3)}, object(), torch.zeros(3)):
    print(measure(a=torch.zeros(3, 2), b=other).shape)
""",
    "module_without_outputs_under_set_skip_existing": """
calls = []
with nn.set_skip_existing(True):
    nn.TensorDictModule(calls.append, ["a"], [])(TensorDict(a=torch.zeros(1)))
print(calls)
""",
    # TorchRL: batches of a loader of text, whose dicts have one number beside lists.
    "number_in_from_dict_with_batch_size": """
import numpy as np
batch = {"text": ["a", "b"], "epoch": 3, "inner": {"done": True}, "rate": np.float32(0.5)}
for data in (TensorDict.from_dict(batch, batch_size=[2]), TensorDict.from_any(batch, batch_size=[2])):
    for row in data.unbind(0):
        print(type(row["epoch"]).__name__, row["epoch"], row["inner", "done"], row["text"], float(row["rate"]))
for data in (TensorDict.from_dict({"n": 3}), TensorDict.from_dict({"n": 3, "x": torch.ones(2)}, auto_batch_size=True)):
    print(list(data.batch_size), data["n"].tolist())
""",
    # TorchRL: a storage expands the first row to its size, and programs read one text for each row of a sample.
    "value_of_one_element_in_expand_and_unsqueeze": """
data = TensorDict({"t": "a", "n": {"u": "b"}, "x": torch.zeros(3)}, [])
rows = data.expand(3).clone()
rows[:2] = TensorDict({"t": "a", "n": {"u": "b"}, "x": torch.ones(2, 3)}, [2])
print(rows["t"], rows[:2]["n", "u"], rows[0]["t"], data.unsqueeze(-1)["t"], data.unsqueeze(0).squeeze(0)["t"])
rows[1] = TensorDict({"t": "z", "n": {"u": "b"}, "x": torch.ones(3)}, [])
print(rows["t"], data[None]["t"], data.reshape(1)["t"], data.expand([])["t"], data.expand(2, 2)["t"])
""",
}

PROGRAM = """
import contextlib, io, json, sys, tempfile, torch, warnings
warnings.simplefilter("ignore")
from tensordict import *
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack, nn, tensorclass
from tensordict.nn.distributions import Delta, TruncatedNormal
from torch.distributions import ExpTransform, Independent, Normal, TransformedDistribution
def folder():
    return tempfile.mkdtemp(dir=sys.argv[1])
def save_in(data):
    place = folder()
    data.memmap(place)
    return place
results = {}
for name, code in json.load(sys.stdin).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, dict(globals()))
    results[name] = out.getvalue()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    """Return what each snippet prints with tensordict, and with td."""
    folder: Path = tmp_path_factory.mktemp("snippets")
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")

    def run(*command: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, *command, str(program), str(folder)],
            input=json.dumps(SNIPPETS),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run(), run("-m", "td", "run")


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_prints_same_output(name, printed):
    expected, result = printed
    assert expected[name]
    assert result[name] == expected[name]
