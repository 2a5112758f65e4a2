"""What ``import sortrl`` and the command line load: names come when they are used, heavy packages not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sortrl

HEAVY = ("torch", "numpy", "scipy", "gymnasium", "stable_baselines3", "matplotlib", "tensorboard", "rich", "tyro")
TORCH_COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton")
PLOTS_AND_TEACHERS = ("stable_baselines3", "matplotlib", "tensorboard", "scipy", "tyro")


def loaded(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of the modules a new process has loaded once the code has run."""
    ending = f"\nimport sys; print(*[name for name in {names!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1].split()


def test_importing_sortrl_loads_nothing_heavy():
    assert loaded("import sortrl", HEAVY) == []


def test_asking_for_the_version_loads_neither_torch_nor_an_environment():
    names = tuple(name for name in HEAVY if name not in ("rich", "tyro"))  # the command line's own
    assert loaded("from sortrl.cli import main; main(['--version'])", names) == []


def test_the_help_of_a_command_loads_neither_torch_nor_an_environment():
    code = """
from sortrl.cli import main
try:
    main(['robustify', '--help'])
except SystemExit:
    pass
"""
    names = tuple(name for name in HEAVY if name not in ("rich", "tyro"))
    assert loaded(code, names) == []


@pytest.mark.parametrize("name", ["load", "robustify"])
def test_a_name_loads_torch_but_not_what_it_does_not_need(name):
    assert loaded(f"import sortrl; sortrl.{name}", ("torch", *TORCH_COMPILER, *PLOTS_AND_TEACHERS)) == ["torch"]


def test_every_public_name_is_there_and_listed():
    assert set(sortrl.__all__) <= set(dir(sortrl))
    for name in sortrl.__all__:
        assert getattr(sortrl, name).__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="has no attribute 'robustifi'"):
        sortrl.robustifi  # noqa: B018


def test_modules_are_attributes_but_a_function_keeps_its_name_from_the_module_of_that_name():
    code = """
import sortrl
import sortrl.evaluate, sortrl.distill
from sortrl.data.collect import collect
assert sortrl.collect is collect
assert callable(sortrl.evaluate) and callable(sortrl.distill)
import sys
assert sortrl.evaluate is sys.modules["sortrl.evaluate.returns"].evaluate
assert sortrl.certify.save_certificates and sortrl.attacks.PGD
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(capsys):
    from importlib.metadata import version

    from sortrl.cli import main

    main(["--version"])
    assert capsys.readouterr().out == f"sortrl {version('sortrl')}\n"
