"""SECURITY.md: each sentence of what is promised has a test, which this table names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from td_core import TensorDict
from td_core.errors import FIRST_PARTY, MissingPluginError, TensorDictError
from td_core.spi import decode, encode

ROOT = Path(__file__).parents[1]

#: The beginning of each promise, and the tests that hold it.
PROMISES = {
    "Loading a file or directory never executes": [
        "test_load_pickled_value_without_permission_raises", "test_pickle_in_group_is_not_executed",
        "test_load_unknown_class_is_not_imported",
    ],
    "Damaged and manipulated files raise": [
        "test_a_damaged_save_is_an_error", "test_read_changed_json_raises_or_returns_collection",
        "test_read_link_out_of_group_raises", "test_receive_invalid_sizes_raise_before_allocating",
    ],
    "A pipe, a device or a socket": ["test_pipe_in_place_of_any_file_of_a_save_raises"],
    "A header cannot describe more nodes": ["test_read_header_of_too_many_nodes_raises"],
    "Metadata has a checksum": [
        "test_change_any_byte_of_metadata_is_found", "test_load_changed_byte_of_metadata_never_returns_other_data",
    ],
    "This holds for": ["test_flipped_bits_raise_only_documented_errors"],
    "A value in a file is created only": ["test_load_unknown_class_error_names_remedy"],
    "`send`, `recv`, `isend`": ["test_recv_changed_json_raises_or_writes_collection"],
    "A message that is shorter": [
        "test_recv_cut_message_raises_and_writes_nothing", "test_receive_cut_message_of_collective_raises",
    ],
    '`wire="reference"`': ["test_recv_cut_reference_message_keeps_what_did_not_arrive"],
    "Values travel by the same serializers": ["test_codec_split_unregistered_type_raises_with_path"],
    "Headers and metadata from a URL": ["test_replaced_object_of_server_without_ranges_is_read_again"],
    "Options, passwords and queries": ["test_secret_is_nowhere", "test_pickle_has_no_secrets_and_reopen_gives_them_back"],
    "A redirect to another host": [
        "test_redirect_to_other_host_drops_credentials", "test_redirect_with_obstore_drops_credentials",
    ],
    "A URL that begins with": ["test_write_without_encryption_needs_permission"],
    "A cache removes only": ["test_directory_with_other_files_is_refused"],
    "A message never proposes": ["test_message_about_package_named_in_a_file_proposes_no_install"],
    "The names of this project": ["test_message_about_missing_sibling_names_a_checkout"],
}  # fmt: skip


def list_promises() -> list[str]:
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("## What is promised")[2].partition("\n## ")[0]
    plain = re.sub(r"\*\*[^*]*\*\*", "", section)
    return re.split(r"(?<=\.)\s+", " ".join(plain.split()).strip())


def test_promises_of_security_page_have_rows() -> None:
    for sentence in filter(None, list_promises()):
        assert sum(sentence.startswith(begin) for begin in PROMISES) == 1, sentence
    assert len(list_promises()) == len(PROMISES)


@pytest.mark.once
def test_rows_of_security_page_name_tests_that_exist() -> None:
    folders = [*ROOT.glob("packages/*/tests"), ROOT / "tests", ROOT / "packages/td-core/src/td_core/testing"]
    sources = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    found = {name for text in sources for name in re.findall(r"def (test_\w+)", text)}
    assert {name for names in PROMISES.values() for name in names} <= found


@pytest.mark.parametrize(
    "name", ["evil", "td-evil", "td_memmap", "TD-MEMMAP", "tensordict", "./x", "a; rm", 3]
)
def test_message_about_package_named_in_a_file_proposes_no_install(name: object) -> None:
    encoded = encode(TensorDict({"a": torch.ones(2)}))
    encoded.nodes[0].update({"kind": "Unknown", "from": f"{name}==1.0"})
    with pytest.raises(TensorDictError) as caught:
        decode(encoded)
    assert "install " not in str(caught.value).replace("install it from where its authors publish it", "")


def test_message_about_missing_sibling_names_a_checkout() -> None:
    for name in sorted(FIRST_PARTY):
        if name not in MissingPluginError.unavailable:
            text = MissingPluginError.describe(name)
            folders = " ".join(f"./packages/{each}" for each in (*FIRST_PARTY[name], name))
            assert f"pip install {folders} in a checkout of td" in text
