"""What trainers of other libraries do with collections: the table of the page "Trainers"."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from td_core import StructureError, TensorDict

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


Results = Callable[[str, str], dict[str, list[Any]]]


@pytest.fixture
def results(run: Callable[..., list[Any]]) -> Results:
    """Return a function that runs a program and returns its results by name, or skips the test if its library is missing."""

    def call(module: str, program: str) -> dict[str, list[Any]]:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
        return {name: values for name, *values in run(f"{program}.py")}

    return call


def test_lightning_fits_validates_and_logs(results):
    found = results("pytorch_lightning", "trainer_lightning")
    batches = [["TensorDict", [4]], ["TensorDict", [4]], ["TensorDict", [2]]]
    with pytest.raises(StructureError) as caught:
        iter(TensorDict())
    precisions = {}
    for name in ("64-true", "bf16-true"):
        precisions[f"as it comes {name}"] = ["RuntimeError", []]
        precisions[f"converted {name}"] = ["trained", batches]
        precisions[f"as mapping {name}"] = ["trained", [["TensorDict", []]] * 3]
        precisions[f"as mapping, resized {name}"] = ["trained", batches]
    assert found == {
        **precisions,
        "fit": ["trained", batches],
        "validate": [f"StructureError: {caught.value}"],
        "validate with batch_size=": ["mean over rows: True"],
        "validate as mapping": ["mean over rows: True", batches],
    }


def test_accelerate_prepares_and_dispatches(results):
    found = results("accelerate", "trainer_accelerate")
    parts = [[[0.0, 2.0], [8.0, 10.0]], [[4.0, 6.0], [12.0, 14.0]]]
    for rank, rows in enumerate(parts):
        batches = [[["TensorDict", [2], row] for row in rows], True]
        assert found[f"{rank} prepare"] == found[f"{rank} prepare, mapping"] == [batches]
        assert found[f"{rank} dispatch dicts"] == [[[["dict", [], row] for row in rows], True]]
        assert found[f"{rank} slice_tensors"] == [[8]]  # Accelerate returns the whole batch
        assert found[f"{rank} slice_tensors, mapping"] == [[2, 1], []]
        assert found[f"{rank} slice_tensors, size set"] == [[2]]


def test_transformers_trains_with_collate(results):
    found = results("transformers", "trainer_hugging_face")
    assert found["train"] == [[[[4, 2], [4, 2], [2, 2]], True, [10, 1]]]
    # As a mapping, a batch is rebuilt without batch dims, and its length is asked for.
    assert found["train as mapping"] == [
        "TypeError: a TensorDict without batch dims has no length and is not a s"
    ]


@pytest.mark.parametrize("how", ["plain", "mapping"])
def test_ddp_averages_gradients_of_collections(how, results):
    found = results("torch", "trainer_ddp")
    for rank in (0, 1):
        assert found[f"{rank} all used, {how}"] == ["2 gradients"]
        assert found[f"{rank} unused, tensors, {how}"] == ["2 gradients"]
        [message] = found[f"{rank} unused, {how}"]
        assert message.startswith("RuntimeError: Expected to mark a variable ready only once")


#: What each library does with a ``Loader``, as the program reports it.
LOADERS = {
    "torch": {"rest": [True]},
    "torchdata": {"0 workers": [True, True], "2 workers": [True, True]},
    "lightning": {
        "epochs": [True],
        "resume": [True],
        "default": [[6, 12, 18], True],
        "every_n_epochs": [[6, 12, 18], True],
        "every_n_train_steps": [[3, 6, 9, 12, 15, 18], True],
    },
    "accelerate": {"prepare": [True], "skip": [True]},
    "transformers": {"resume": [True]},
}


@pytest.mark.parametrize("library", LOADERS)
def test_loader_keeps_its_order_and_resumes_in_library(library: str, run: Callable[..., list[Any]]) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    found = run("loader_trainers.py", library)
    assert {name: values for name, *values in found} == LOADERS[library]


def test_page_has_a_row_for_each_library():
    text = PAGE.read_text(encoding="utf-8")
    for name in ("Lightning", "Accelerate", "Hugging Face Trainer", "DistributedDataParallel"):
        assert f"| {name}" in text
