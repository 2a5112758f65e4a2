"""Modules that the user names: a task's, or an attack's. Nothing else decides what is imported, least of all a file."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from sortrl.core.errors import SortRLError


def imported(name: str, what: str) -> ModuleType:
    """Import a module for ``what`` (said in errors); like a script's, it may lie in the working directory.

    >>> imported("math", "an example").pi > 3
    True
    """
    here = os.getcwd()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0] or here in sys.path:
            raise _failed(name, what, error) from error
    except Exception as error:  # whatever the user's module raises
        raise _failed(name, what, error) from error
    sys.path.append(here)  # at the end: it must not hide what is installed
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _failed(name, what, error) from error


def _failed(name: str, what: str, error: Exception) -> SortRLError:
    return SortRLError(
        f"Cannot import the module {name!r} for {what}: {error}. Write its name as in Python, and install it or run this where it lies."
    )
