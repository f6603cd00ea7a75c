"""The code blocks of the tutorials of tensordict run with td, one test per block.

The blocks are in the Markdown files of this folder. Only the import name and the paths are replaced; the paths point to a
temporary folder. If the document shows output, the printed output is compared with it.
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


def read_blocks() -> dict[str, Block]:
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


BLOCKS = read_blocks()


def adapt(code: str, folder: Path) -> str:
    """Replace the import name by td, and the paths by paths in ``folder``."""
    code = re.sub(r"\bfrom tensordict(\.\w+)? import", "from td import", code)
    return code.replace('"/path/to/', f'"{folder.as_posix()}/')


def remove_punctuation(text: str) -> str:
    """Remove the punctuation of an OrderedDict, because its repr changed in Python 3.12."""
    return re.sub(r"[\[\](){},:']", "", text) if "OrderedDict" in text else text


def execute_block(block: Block, folder: Path, namespace: dict[str, Any]) -> None:
    """Run a block, and compare its output with the output that the document shows."""
    code, source = adapt(block.code, folder), f"{block.document}.md"
    if not code.startswith(">>>"):
        exec(compile(code, source, "exec"), namespace)
        return
    for example in doctest.DocTestParser().get_examples(code, block.name):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The documents show the value of the last line of a block only.
            mode = "single" if example.want and "\n" not in example.source.rstrip() else "exec"
            exec(compile(example.source, source, mode), namespace)
        print(printed.getvalue(), end="")
        if example.want:
            assert remove_punctuation(printed.getvalue()) == remove_punctuation(example.want)


def run_with_dependencies(block: Block, folder: Path) -> dict[str, Any]:
    """Run a block after the blocks that it needs, and return its namespace."""
    namespace: dict[str, Any] = {"__name__": "block", "raises": pytest.raises}
    # A dataclass looks up its module in sys.modules.
    sys.modules["block"] = type(sys)("block")
    for name in block.after:
        execute_block(BLOCKS[f"{block.document}/{name}"], folder, namespace)
    execute_block(block, folder, namespace)
    return namespace


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_preallocation(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["data_disk"].batch_size == (1_000_000,)
    assert namespace["data_disk"]["image"].shape == (1_000_000, 3, 64, 64)
    # The file is sparse, so a million rows need little disk space.
    assert (folder / "data/image.memmap").stat().st_size == 1_000_000 * 3 * 64 * 64 * 8
    assert (folder / "data/image.memmap").stat().st_blocks * 512 < 2**20


def check_prefix(namespace: dict[str, Any], folder: Path) -> None:
    wanted = {"a.memmap", "b/c.memmap", "b/meta.json", "meta.json"}
    assert wanted <= list_files(folder / "tensordict")


def check_consolidated(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["td_c"].is_consolidated()
    assert (namespace["td_c"] == namespace["td"]).all()


def check_consolidated_file(namespace: dict[str, Any], folder: Path) -> None:
    check_consolidated(namespace, folder)
    assert (namespace["TensorDict"].from_consolidated(folder / "storage.memmap") == namespace["td"]).all()


def check_memmap(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["tensordict"].is_memmap()
    assert type(namespace["tensordict"]["b", "c"]).__name__ == "MemoryMappedTensor"


def check_memmap_like(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["mm_tensordict"]["a"].tolist() == [0.0] * 10


def check_dataset(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["data"][torch.tensor([1, 10000, 500000])]["images"].shape == (3, 128, 128, 3)


def check_preallocated(namespace: dict[str, Any], folder: Path) -> None:
    assert namespace["data"]["a"].shape == (10, 3)
    assert namespace["data"]["b", "c"].shape == (10, 2)
    assert namespace["data"]["b"].batch_size == (10,)


def check_flat(namespace: dict[str, Any], folder: Path) -> None:
    assert set(namespace["tensordict_flatten"].keys()) == {"key 1", "key 2.sub-key"}


def check_uniform(namespace: dict[str, Any], folder: Path) -> None:
    assert (
        (namespace["tensordict_uniform"]["key 1"] >= 0) & (namespace["tensordict_uniform"]["key 1"] < 1)
    ).all()


def check_filter(namespace: dict[str, Any], folder: Path) -> None:
    assert list(namespace["data_float"].keys()) == ["a"]


def check_functional(namespace: dict[str, Any], folder: Path) -> None:
    torch.testing.assert_close(namespace["y"], torch.stack([namespace["out"]] * 2))


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


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch.nn.Transformer warns about its own default
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # the same warning with other words
@pytest.mark.parametrize("key", [key for key, block in BLOCKS.items() if block.needs in ("", "cuda")])
def test_code_block_runs_and_prints_shown_output(key: str, tmp_path: Path, device: torch.device) -> None:
    import td

    if BLOCKS[key].needs == "cuda" and device.type != "cuda":
        pytest.skip("the block puts its data on a CUDA device")
    with td.set_printoptions(compact=False, sort_keys="alphabetical"):
        namespace = run_with_dependencies(BLOCKS[key], tmp_path)
    if key in CHECKS:
        CHECKS[key](namespace, tmp_path)


def test_tree_block_prints_every_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with_dependencies(BLOCKS["saving/tree"], tmp_path)
    printed = capsys.readouterr().out
    assert {line.strip() for line in printed.splitlines()} >= {
        "tensorclass/", "_tensordict/", "data.memmap", "td_list/", "meta.json",
    }  # fmt: skip


def write_script(code: str, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(adapt(code, folder))
    return path


@pytest.mark.once
def test_map_block_as_script_succeeds(tmp_path: Path) -> None:
    path = write_script(
        BLOCKS["overview/map"].code + "    assert data_preproc is None\n", tmp_path, "mapping.py"
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.once
def test_distributed_block_on_two_ranks_succeeds(tmp_path: Path) -> None:
    head = (
        "import sys, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store',"
        " rank=int(sys.argv[1]), world_size=2)\n"
    )
    tail = "\ndist.barrier()\ndist.destroy_process_group()\n"
    path = write_script(head + BLOCKS["overview/distributed"].code + tail, tmp_path, "ranks.py")
    ranks = [
        subprocess.Popen([sys.executable, path, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
