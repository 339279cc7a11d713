"""Where all chance comes from: one seed a purpose, so that no two parts of a run draw the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(purpose: str, *numbers: int) -> int:
    """The seed of what is drawn for a purpose, such as ``("policy", episode seed, turn)``.

    The first 53 bits of the SHA-256 of ``purpose/number/number``: the same in every process and version of Python, and
    exact wherever numbers are doubles (JSON in a browser). Nothing shows in it how close the numbers are.

    Example::

        derive_seed("policy", 0, 0) != derive_seed("world model", 0, 0)
    """
    name = "/".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 11
