"""The code blocks that users of the reference implementation learn from run here, one test a block.

The blocks are in the Markdown files beside this one. Only the import name changes, and paths, which lead into
a temporary folder. Output that a block prints is compared where the document shows it.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("td")

HERE = Path(__file__).parent
FENCE = re.compile(r"^```python (?P<head>.+?)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One code block of a document."""

    document: str
    name: str
    code: str
    after: tuple[str, ...]
    needs: str


def read() -> dict[str, Block]:
    """Return every block by ``document/name``."""
    blocks = {}
    for path in sorted(HERE.glob("*.md")):
        for fence in FENCE.finditer(path.read_text(encoding="utf-8")):
            name, *options = fence["head"].split()
            given = dict(option.split("=") for option in options)
            after = tuple(filter(None, given.get("after", "").split(",")))
            key = f"{path.stem}/{name}"
            blocks[key] = Block(path.stem, name, fence["code"], after, given.get("needs", ""))
    return blocks


BLOCKS = read()


def adapted(code: str, folder: Path) -> str:
    """Return the code with our import name, writing below ``folder``."""
    code = re.sub(r"\bfrom tensordict(\.\w+)? import", "from td import", code)
    return code.replace('"/path/to/', f'"{folder.as_posix()}/')


def unmarked(text: str) -> str:
    """Return a text without what Python 3.12 prints in another way: an OrderedDict, as a dict and not as pairs."""
    return re.sub(r"[\[\](){},:']", "", text) if "OrderedDict" in text else text


def execute(block: Block, folder: Path, namespace: dict[str, Any]) -> None:
    """Run a block; compare what it prints where the document shows output."""
    code, source = adapted(block.code, folder), f"{block.document}.md"
    if not code.startswith(">>>"):
        exec(compile(code, source, "exec"), namespace)
        return
    for example in doctest.DocTestParser().get_examples(code, block.name):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The documents show no value but that of the last line, where they show one at all.
            mode = "single" if example.want and "\n" not in example.source.rstrip() else "exec"
            exec(compile(example.source, source, mode), namespace)
        print(printed.getvalue(), end="")
        if example.want:
            assert unmarked(printed.getvalue()) == unmarked(example.want)


def run(block: Block, folder: Path) -> dict[str, Any]:
    """Run a block after those it builds on and return its namespace."""
    namespace: dict[str, Any] = {"__name__": "block", "raises": pytest.raises}
    # A dataclass looks its module up by name.
    sys.modules["block"] = type(sys)("block")
    for name in block.after:
        execute(BLOCKS[f"{block.document}/{name}"], folder, namespace)
    execute(block, folder, namespace)
    return namespace


def sizes(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_preallocation(space: dict[str, Any], folder: Path) -> None:
    assert space["data_disk"].batch_size == (1_000_000,)
    assert space["data_disk"]["image"].shape == (1_000_000, 3, 64, 64)
    # The file is sparse: the million rows take next to no space.
    assert (folder / "data/image.memmap").stat().st_size == 1_000_000 * 3 * 64 * 64 * 8
    assert (folder / "data/image.memmap").stat().st_blocks * 512 < 2**20


def check_prefix(space: dict[str, Any], folder: Path) -> None:
    wanted = {"a.memmap", "b/c.memmap", "b/meta.json", "meta.json"}
    assert wanted <= sizes(folder / "tensordict")


def check_consolidated(space: dict[str, Any], folder: Path) -> None:
    assert space["td_c"].is_consolidated()
    assert (space["td_c"] == space["td"]).all()


def check_consolidated_file(space: dict[str, Any], folder: Path) -> None:
    check_consolidated(space, folder)
    assert (space["TensorDict"].from_consolidated(folder / "storage.memmap") == space["td"]).all()


def check_memmap(space: dict[str, Any], folder: Path) -> None:
    assert space["tensordict"].is_memmap()
    assert type(space["tensordict"]["b", "c"]).__name__ == "MemoryMappedTensor"


def check_memmap_like(space: dict[str, Any], folder: Path) -> None:
    assert space["mm_tensordict"]["a"].tolist() == [0.0] * 10


def check_dataset(space: dict[str, Any], folder: Path) -> None:
    assert space["data"][torch.tensor([1, 10000, 500000])]["images"].shape == (3, 128, 128, 3)


def check_preallocated(space: dict[str, Any], folder: Path) -> None:
    assert space["data"]["a"].shape == (10, 3)
    assert space["data"]["b", "c"].shape == (10, 2)
    assert space["data"]["b"].batch_size == (10,)


def check_flat(space: dict[str, Any], folder: Path) -> None:
    assert set(space["tensordict_flatten"].keys()) == {"key 1", "key 2.sub-key"}


def check_uniform(space: dict[str, Any], folder: Path) -> None:
    assert ((space["tensordict_uniform"]["key 1"] >= 0) & (space["tensordict_uniform"]["key 1"] < 1)).all()


def check_filter(space: dict[str, Any], folder: Path) -> None:
    assert list(space["data_float"].keys()) == ["a"]


def check_functional(space: dict[str, Any], folder: Path) -> None:
    torch.testing.assert_close(space["y"], torch.stack([space["out"]] * 2))


CHECKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "saving/preallocation": check_preallocation,
    "saving/prefix": check_prefix,
    "saving/consolidate": check_consolidated,
    "saving/consolidate-file": check_consolidated_file,
    "memory/memmap": check_memmap,
    "memory/memmap-like": check_memmap_like,
    "overview/dataset": check_dataset,
    "overview/preallocation-stack": check_preallocated,
    "overview/preallocation-lazy": check_preallocated,
    "overview/flatten": check_flat,
    "overview/apply": check_uniform,
    "overview/filter": check_filter,
    "overview/functional": check_functional,
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of torch.nn.Transformer, in its default form
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch, about its own Transformer
@pytest.mark.parametrize("key", [key for key, block in BLOCKS.items() if block.needs in ("", "cuda")])
def test_block_runs(key: str, tmp_path: Path, device: torch.device) -> None:
    import td

    if BLOCKS[key].needs == "cuda" and device.type != "cuda":
        pytest.skip("the block puts its data on a CUDA device")
    with td.set_printoptions(compact=False):
        namespace = run(BLOCKS[key], tmp_path)
    if key in CHECKS:
        CHECKS[key](namespace, tmp_path)


def test_directory_tree_lists_every_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(BLOCKS["saving/tree"], tmp_path)
    printed = capsys.readouterr().out
    assert {line.strip() for line in printed.splitlines()} >= {
        "tensorclass/", "_tensordict/", "data.memmap", "td_list/", "meta.json",
    }  # fmt: skip


def script(code: str, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(adapted(code, folder))
    return path


@pytest.mark.slow
def test_map_block_runs_as_a_script(tmp_path: Path) -> None:
    path = script(BLOCKS["overview/map"].code + "    assert data_preproc is None\n", tmp_path, "mapping.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_distributed_block_runs_on_two_ranks(tmp_path: Path) -> None:
    head = (
        "import sys, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store',"
        " rank=int(sys.argv[1]), world_size=2)\n"
    )
    tail = "\ndist.barrier()\ndist.destroy_process_group()\n"
    path = script(head + BLOCKS["overview/distributed"].code + tail, tmp_path, "ranks.py")
    ranks = [
        subprocess.Popen([sys.executable, path, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
