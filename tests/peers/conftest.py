"""Ours against other people's implementations, where both define the same thing: ``make peers``.

They need an environment with TRL and verl, so that nothing of it decides what we run with; elsewhere these tests are
not collected. Agreement is to 1e-5, gradients included. A test whose name begins with ``test_differs`` states a
deliberate difference and shows it.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") and find_spec("trl") else ["test_*.py"]
