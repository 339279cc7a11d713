"""``imagine import``: one command, and the other stages work on what it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imagination.cli import main
from real_envs.store import TrajectoryStore

ROOMS = ("attic", "cellar", "hall", "kitchen", "yard")


def episode(task: int, trial: int) -> dict[str, Any]:
    """A chat about a key in one of five rooms; a wrong room is no success."""
    right = (task + trial) % 2 == 0
    room = ROOMS[task]
    said = [
        {"role": "user", "content": f"The key is in the {room}. Ask ada@example.org. Case {task}."},
        {"role": "assistant", "content": f"go {room if right else 'away'}"},
        {"role": "user", "content": "A key." if right else "Nothing."},
        {"role": "assistant", "content": "take key"},
        {"role": "user", "content": f"Case {task} is {'closed' if right else 'open'}. Trial {trial}."},
    ]
    return {"task_id": task, "messages": said, "reward": 10.0 if right else 0.0, "plan": {"depth": trial}}


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "log.jsonl", *(episode(task, trial) for task in range(5) for trial in range(8)))


def imagine(tmp_path: Path, *words: str) -> int:
    return main([*words, "run=mine", f"output={tmp_path}"])


def test_a_log_is_imported_and_learned_from(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imagine(tmp_path, "import", "auto", str(log), "imports.heldout=0.2", "imports.solved_at=10") == 0
    out = capsys.readouterr().out
    for words in (
        f"{log}: openai, as its records have messages with 'role' in 'messages'",
        "40 episodes added",
        "left out: plan (40)",
        "secrets masked: 1 email",
        "the log: 40 episodes of 5 tasks (1 heldout, 4 train), 80 turns",
        "known in 40 episodes, 20 solved",
        "imagine fit-world-model run=mine",
    ):
        assert words in out
    store = TrajectoryStore.open(tmp_path / "mine" / "log")
    assert store.meta["solved_at"] == 10
    assert {split: len(tasks) for split, tasks in store.splits.items()} == {"train": 4, "heldout": 1}
    assert (store.summary().total.solved, store.summary().total.judged) == (20, 40)
    texts = repr(list(store.read()))
    assert "ada@example.org" not in texts
    assert "<email#" in texts
    covered = json.loads((tmp_path / "mine" / "coverage.json").read_text())
    assert (covered["episodes"], covered["success"]["solved"]) == (40, 20)

    small = ["preset=tiny", "fit.steps=4", "clone.steps=2", "max_action_tokens=64", "audit.episodes=4"]
    assert imagine(tmp_path, "fit-world-model", *small) == 0
    assert imagine(tmp_path, "clone", "clone.agents=[log]") == 0
    assert imagine(tmp_path, "audit") == 0
    assert (tmp_path / "mine" / "audit.json").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_again_adds_nothing_and_a_longer_one_only_what_is_new(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    before = {t.id: t for t in TrajectoryStore.open(tmp_path / "mine" / "log").read()}
    splits = TrajectoryStore.open(tmp_path / "mine" / "log").splits
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    assert "0 episodes added, 40 were in the log already" in capsys.readouterr().out
    new = episode(0, 0) | {"task_id": "new"}
    log.write_text(f"{json.dumps(new)}\n{log.read_text()}")
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    assert "1 episodes added, 40 were in the log already" in capsys.readouterr().out
    store = TrajectoryStore.open(tmp_path / "mine" / "log")
    after = {t.id: t for t in store.read()}
    assert {id_: after[id_] for id_ in before} == before  # masks included
    assert {t.task_id for id_, t in after.items() if id_ not in before} == {"new"}
    assert all(set(tasks) <= set(store.splits[split]) for split, tasks in splits.items())


def test_what_is_refused_is_named_and_counted_and_the_rest_goes_on(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(f'{{"messages": 3}}\nno json\n{log.read_text()}')
    quoting = write(tmp_path / "b.jsonl", {"messages": [{"role": "bob@example.org", "content": "x"}]})
    assert main(["import", "openai", str(log), str(quoting), "run=masked", f"output={tmp_path}"]) == 0
    assert "bob@example.org" not in capsys.readouterr().out + (tmp_path / "masked" / "refused.jsonl").read_text()
    assert imagine(tmp_path, "import", "openai", str(log), "imports.mask=false") == 0
    out = capsys.readouterr().out
    assert "40 episodes added\n2 records refused, all of them in refused.jsonl:" in out
    assert f"{log}: line 1, field 'messages' is no list of messages" in out
    rows = [json.loads(line) for line in (tmp_path / "mine" / "refused.jsonl").read_text().splitlines()]
    assert [(row["record"], row["field"]) for row in rows] == [("line 1", "messages"), ("line 2", "")]
    assert "secrets are not masked" in out
    assert "ada@example.org" in repr(list(TrajectoryStore.open(tmp_path / "mine" / "log").read()))


def test_unknown_success_is_said_and_not_guessed(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{k: v for k, v in episode(t, 0).items() if k != "reward"} for t in range(5)]
    assert imagine(tmp_path, "import", "auto", str(write(log, *points))) == 0
    out = capsys.readouterr().out
    assert "known in 0 episodes, 0 solved" in out
    assert "success is unknown in 5 of 5 episodes" in out
    assert [t.success for t in TrajectoryStore.open(tmp_path / "mine" / "log").read()] == [None] * 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no files are named; write `imagine import auto my-log.jsonl run=...`"),
        (["auto", "none.json"], "none.json cannot be read: No such file or folder"),
        (["opena", "{log}"], "unknown format 'opena'; did you mean 'openai'?"),
        (
            ["intercode", "{log}"],
            "nothing to import: no record is an episode; the first is refused: {log}: line 1, field 'turn_history'",
        ),
        (["openai", "{log}", "imports.heldout=1"], "imports: heldout is a share of the tasks"),
        (["huggingface", "{log}", "imports.mapping.acton=a"], "imports.mapping names 'acton'; known are action"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, log: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imagine(tmp_path, "import", *(word.format(log=log) for word in words)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said.format(log=log) in line
    assert not (tmp_path / "mine" / "log").exists()


def test_a_run_keeps_its_threshold_and_a_collected_log_is_left_alone(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imagine(tmp_path, "import", "auto", str(log)) == 0
    assert imagine(tmp_path, "import", "auto", str(log), "imports.solved_at=5") == 2
    assert "was imported with {'solved_at': None}" in capsys.readouterr().err
    TrajectoryStore.create(tmp_path / "other" / "log", {"train": ["t"]}, {"environment": "textworld"})
    assert main(["import", "auto", str(log), "run=other", f"output={tmp_path}"]) == 2
    assert "was not imported" in capsys.readouterr().err


def test_what_the_next_commands_need_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = episode(0, 0)
    long["messages"][1]["content"] = "w " * 200
    assert imagine(tmp_path, "import", "auto", str(write(tmp_path / "a.jsonl", long))) == 0
    assert "imagine fit-world-model run=mine max_action_tokens=256" in capsys.readouterr().out  # 400 characters by two
