"""Paths of members in error messages; check(), print and graph() of sequences."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from td_core import TensorDict
from td_nn import MissingKeyError, TensorDictModule, TensorDictSequential

ONE = torch.ones(1)


def layer(in_keys, out_keys, **options):
    return TensorDictModule(nn.Linear(1, 1), in_keys, out_keys, **options)


def said(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("strict", [True, False])
def test_missing_key_error_has_member_path_and_later_writer(strict):
    inner = TensorDictSequential(
        {"dec": layer(["hidden"], ["y"], strict=strict), "late": layer(["x"], ["hidden"])}
    )
    seq = TensorDictSequential(layer(["x"], ["hiden"]), inner)
    with pytest.raises(KeyError) as caught:
        seq(TensorDict(x=ONE))
    error = caught.value
    assert isinstance(error, MissingKeyError)
    assert (error.path, error.missing) == ('seq[1]["dec"]', ["hidden"])
    assert "seq[1][\"dec\"], a TensorDictModule(Linear), misses its input 'hidden'" in str(error)
    assert "did you mean 'hiden'?" in str(error)
    assert "'hidden' is written later, by seq[1][\"late\"]" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_error_of_callable_gets_note_with_member_path():
    def fail(x):
        raise ZeroDivisionError("so it is")

    inner = TensorDictSequential({"dec": TensorDictModule(fail, ["h"], ["y"])})
    seq = TensorDictSequential(layer(["x"], ["h"]), inner)
    with pytest.raises(ZeroDivisionError) as caught:
        seq(TensorDict(x=torch.ones(2, 1)))
    text = said(caught.value)
    assert 'raised in seq[1]["dec"], TensorDictModule(fail)' in text
    assert "reads {'h': Tensor of shape [2, 1]} and writes ['y']" in text
    assert text.count("raised in") == 1


def test_error_of_collection_function_gets_note_with_member_path():
    seq = TensorDictSequential(layer(["x"], ["h"]), lambda td: td["nothing"])
    with pytest.raises(KeyError) as caught:
        seq(TensorDict(x=ONE))
    assert "raised in seq[1], WrapModule(<lambda>), which reads [] and writes []" in said(caught.value)


def test_error_raised_twice_has_one_note():
    error = RuntimeError("same")

    def fail(x):
        raise error

    made = TensorDictModule(fail, ["x"], ["y"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same"):
            made(TensorDict(x=ONE))
    assert said(error).count("raised in") == 1


def test_check_reports_missing_unread_and_overwritten_keys():
    seq = TensorDictSequential(
        {
            "enc": layer(["x"], ["hidden"]),
            "side": layer(["x"], [("n", "unused")]),
            "dec": layer(["hiden", "later"], ["x"]),
            "end": layer(["x"], ["later", "_"]),
        }
    )
    report = seq.check(["x"])
    assert report.missing == [
        ('seq["dec"]', "hiden", "; did you mean 'hidden'?"),
        ('seq["dec"]', "later", '; seq["end"] writes it later'),
    ]
    assert report.unread == [('seq["enc"]', "hidden"), ('seq["side"]', ("n", "unused"))]
    assert report.overwritten == [('seq["dec"]', "x", "the input")]
    assert not report
    assert str(report).splitlines()[0] == (
        "missing: seq[\"dec\"] reads 'hiden', which is not there; did you mean 'hidden'?"
    )
    assert "overwritten: seq[\"dec\"] writes 'x', which the input gives" in str(report)


@pytest.mark.parametrize("keys", [None, ["x"], TensorDict(x=ONE)])
def test_check_sequence_without_faults_reports_nothing(keys):
    seq = TensorDictSequential(layer(["x"], ["h"]), TensorDictSequential(layer(["h"], ["y"])))
    report = seq.check(keys)
    assert report
    assert (report.missing, report.unread, report.overwritten, report.undeclared) == ([], [], [], [])
    assert str(report) == "every key that is read is there, and every key that is written is read or kept"


def test_check_written_node_provides_keys_below_it():
    seq = TensorDictSequential(TensorDictModule(lambda x: {"a": x}, ["x"], ["n"]), layer([("n", "a")], ["y"]))
    assert seq.check()
    assert seq.check(TensorDict({"x": ONE, "n": {"a": ONE}}))
    below = TensorDictSequential(layer(["x"], [("n", "a")]), TensorDictModule(lambda n: n["a"], ["n"], ["y"]))
    assert below.check(["x"]).missing == [("seq[1]", "n", "")]
    assert below.check(["x", "n"])
    assert below.check(TensorDict({"x": ONE, "n": {"a": ONE}}))


def test_check_selected_output_counts_as_read():
    seq = TensorDictSequential(layer(["x"], ["h"]), layer(["x"], ["y"]))
    assert seq.check().unread == [("seq[0]", "h")]
    assert seq.select_out_keys("h").check().unread == []


def test_check_lists_members_without_keys():
    seq = TensorDictSequential(layer(["x"], ["h"]), lambda td: td, layer(["made"], ["y"]))
    report = seq.check(["x"])
    assert report
    assert report.undeclared == ["seq[1]"]
    assert "undeclared: seq[1] does not say its keys" in str(report)


def test_print_sequence_shows_table_of_keys():
    seq = TensorDictSequential(
        {"enc": layer(["x"], ["h"]), "in": TensorDictSequential(layer([("n", "k")], ["_"]), lambda td: td)}
    )
    assert str(seq).splitlines() == [
        "TensorDictSequential: x, n.k -> h, _",
        "member     module                    reads  writes",
        '["enc"]    TensorDictModule(Linear)  x      h',
        '["in"][0]  TensorDictModule(Linear)  n.k    _',
        '["in"][1]  WrapModule(<lambda>)      -      -',
    ]
    assert repr(seq).startswith("TensorDictSequential(\n    module=ModuleDict(")


def test_graph_has_mermaid_node_per_value():
    seq = TensorDictSequential(layer(["x"], ["h"]), layer(["h"], ["x"]), layer(["x"], [("n", "y")]))
    assert seq.graph().splitlines() == [
        "flowchart LR",
        '    m0["[0] TensorDictModule(Linear)"]',
        '    k0(["x"]) --> m0',
        '    m0 --> k1(["h"])',
        '    m1["[1] TensorDictModule(Linear)"]',
        "    k1 --> m1",
        '    m1 --> k2(["x"])',
        '    m2["[2] TensorDictModule(Linear)"]',
        "    k2 --> m2",
        '    m2 --> k3(["n.y"])',
    ]
    assert 'm0["[#quot;enc#quot;]' in TensorDictSequential({"enc": layer(["x"], ["h"])}).graph()
