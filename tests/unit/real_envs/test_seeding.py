"""If these fail, parts of a run draw the same random numbers, and what looks like luck is a correlation."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

from real_envs.seeding import derive_seed

ROOT = Path(__file__).parents[3]
# Seeds that are names: the id of a game holds the seed that made it. With other ones an old run would generate anew.
NAMES = ("_SEEDS_OF_A_RUN", "_RESEED", "shuffle(dealt)")


def test_a_seed_is_the_same_everywhere() -> None:
    """The first 53 bits of SHA-256, as `printf policy/0/0 | sha256sum` has them; in another process, too."""
    assert derive_seed("policy", 0, 0) == 0x3C1DEC14464C2205 >> 11
    again = [sys.executable, "-c", "from real_envs.seeding import derive_seed; print(derive_seed('policy', 0, 0))"]
    assert int(subprocess.run(again, capture_output=True, check=True, cwd=ROOT).stdout) == derive_seed("policy", 0, 0)


def test_purposes_and_numbers_have_seeds_of_their_own() -> None:
    """Neighbours too: with linear formulas, one episode's next turn was another's first."""
    names = product(("policy", "world model", "episode"), range(-1, 20), range(20), range(2))
    found = [derive_seed(purpose, *numbers) for purpose, *numbers in names]
    found += [derive_seed("policy", 11), derive_seed("policy", 1, 1), derive_seed("policy")]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 2**53 for seed in found)


def test_no_part_of_a_run_makes_seeds_by_itself() -> None:
    """Neither by arithmetic nor by text: two formulas may meet."""
    sums = r"seed\)? [*+-] |[*+-] \(*[\w.]*seed\b"
    formula = re.compile(sums + r"|Random\(f\"|(Random|default_rng)\((self\.)?_?seed\)|crc32")
    found = [
        f"{path.relative_to(ROOT)}:{n} {line.strip()}"
        for package in ("real_envs", "policy", "worldmodel", "imagination")
        for path in sorted((ROOT / package).rglob("*.py"))
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if formula.search(line) and not any(name in line for name in NAMES)
    ]
    assert not found, "\n".join(found)
