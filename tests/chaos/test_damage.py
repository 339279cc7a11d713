"""A flipped bit and a torn end in every file that a run keeps. If this fails, a damaged run goes on unnoticed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.chaos.flow import NAME, SHORTER, Flow, result

pytestmark = pytest.mark.chaos
# Where files are, a stage that reads them, and the stage before which the run is taken.
READERS = {
    "log": ("clone", "clone"),
    "tokenizer": ("fit-world-model", "clone"),
    "games": ("evaluate", "evaluate"),
    "models/worldmodel": ("train", "train"),
    "models/policy-clone": ("train", "train"),
    "models/rules.json": ("train", "train"),
    "models/policy": ("evaluate", "evaluate"),
    "checkpoints": ("train", "train"),
    "summary.json": ("report", "report"),
    "metrics.jsonl": ("report", "report"),
    "rollouts.jsonl": ("report", "report"),
    "config.yaml": ("report", "report"),
    "overrides.json": ("report", "report"),
}
# Plain text for people: a digit that became another digit is not noticed (docs/reliability.md).
PLAIN = ("metrics.jsonl", "rollouts.jsonl", "config.yaml", "overrides.json")


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        content = content[: len(content) * 9 // 10]
    else:
        bit = random.Random(f"{how} {path.name}").randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("place", READERS)
def test_a_damaged_file_is_named_or_changes_nothing(flow: Flow, place: str) -> None:
    stage, before = READERS[place]
    more = SHORTER.get(stage, ())
    source = flow.copy(before, "source")
    if place == "checkpoints":
        changes = flow.run(stage, flow.copy(before, "whole"), more=more).changes
        assert flow.run(stage, source, "kill", changes * 3 // 4, more).code == -9
    root = flow.place / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(source, root)
    done = flow.run(stage, root, more=more)
    assert done.code == 0, done.err
    whole = result(root / NAME)
    files = [path for path in (source / NAME / place, *(source / NAME / place).rglob("*")) if path.is_file()]
    assert files
    outcomes = []
    for file in files:
        name = str(file.relative_to(source / NAME))
        for how in ("first bit", "second bit", "torn"):
            shutil.rmtree(root)
            shutil.copytree(source, root)
            damage(root / NAME / name, how)
            done = flow.run(stage, root, more=more)
            where = f"{name}, {how}: {done.code} {done.err}"
            assert "Traceback" not in done.err, where
            assert done.code in (0, 2), where
            if done.code == 2:
                assert len(done.errors) == 1, where
                assert file.name in done.errors[0] or f"/{file.parent.name}" in done.errors[0], where
            elif place not in PLAIN:
                made, expected = result(root / NAME), dict(whole)
                assert {**made, name: ""} == {**expected, name: ""}, where
            outcomes.append(f"{name}, {how}: {'named' if done.code else 'same'}")
    print("\n".join(outcomes))
