"""What tests of compiled steps share."""

from __future__ import annotations

import os
import platform
import shutil
import sys

import pytest

COMPILER = shutil.which(os.environ.get("CXX", "g++")) if sys.platform == "linux" else None
# Only where there is nothing to compile with: source that does not compile must fail here.
needs_compiler = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="no g++ for x86-64 Linux: decoding uses torch alone"
)
