"""Which tests hang on luck? Runs them under several seeds, processors and thread counts, and says which ones moved.

``make stability`` before a release; ``ARGS='--seeds 3 tests/e2e/test_tripwires.py'`` for a part. Tiny models learn
other things under another seed, other kernels round in other ways: a test that then fails asks for more than the code
promises. It gets a planted model, the oracle, or a majority of seeds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEED = "IMAGINATION_TEST_SEED"  # added to the seed of every tiny run, see tests/support/tiny.py
MACHINES: Mapping[str, Mapping[str, str]] = {
    "not compiled": {"IMAGINATION_NATIVE": "0"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}


def conditions(seeds: int, machines: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environment variables of each run by its name; the first is the one that all others are held against."""
    one = {"OMP_NUM_THREADS": "1"}
    runs = {f"seed +{seed}": {**one, SEED: str(seed)} for seed in range(seeds)}
    return runs | {name: {**one, **MACHINES[name]} for name in machines}


def failed(tests: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Tests that failed under these variables, each with the line that failed.

    Raises:
        RuntimeError: pytest did not get as far as a result.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={result}", *tests]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
        if not result.exists():
            raise RuntimeError(done.stdout + done.stderr)
        cases = ElementTree.parse(result).getroot().iter("testcase")
        return {
            f"{case.get('classname')}::{case.get('name')}": (problem.get("message") or "error").splitlines()[0]
            for case in cases
            for problem in (*case.findall("failure"), *case.findall("error"))
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a run and then every test that failed somewhere; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests/e2e"], help="what pytest is given (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (default: %(default)s)")
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES), help="all by default")
    chosen = parser.parse_args(arguments)
    runs = conditions(chosen.seeds, chosen.machines)
    moved: dict[str, dict[str, str]] = {}
    for name, variables in runs.items():
        problems = failed(chosen.tests, variables)
        print(f"{name}: {len(problems)} failed", flush=True)
        for test, line in problems.items():
            moved.setdefault(test, {})[name] = line
            print(f"  {test}: {line}", flush=True)
    for test, where in sorted(moved.items()):
        print(f"{test}: failed in {len(where)} of {len(runs)} runs: {', '.join(where)}")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
