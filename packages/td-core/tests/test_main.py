"""The command line ``python -m td_core`` without plugins; its other commands are tested with their formats."""

from __future__ import annotations

import sys

import pytest

import td_core.__main__


def test_main_plugins_without_plugins_prints_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(td_core.__main__, "plugins", list)
    monkeypatch.setattr(sys, "argv", ["td_core", "plugins"])
    td_core.__main__.main()
    assert capsys.readouterr().out == "no plugins are installed\n"
