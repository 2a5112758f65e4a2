"""Modules that the user names."""

from __future__ import annotations

import sys

import pytest

from sortrl.core.errors import SortRLError
from sortrl.core.modules import imported


def test_a_module_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "own_module_of_a_test.py").write_text("VALUE = 3\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(SortRLError, match=r"Cannot import the module 'own_module_of_a_test' for the test"):
        imported("own_module_of_a_test", "the test")
    monkeypatch.chdir(tmp_path)
    assert imported("own_module_of_a_test", "the test").VALUE == 3


def test_what_a_module_raises_is_said(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_test.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SortRLError, match="no_such_thing"):
        imported("broken_module_of_a_test", "the test")
