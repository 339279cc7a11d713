"""``imagine import``: one command, and the other stages work on what it made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagination.cli import main
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Turn
from tests.support.judging import Answer, judge, says
from worldmodel.world_model import Prediction

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


class Paying:
    """Dreams of two turns that earn 5 each, and by their seed of one."""

    version = "planted"
    engines = ()

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        return Prediction("Go on.", 5.0, len(history) > 0 or seed % 2 == 1, 0.99, 0.99)

    def release(self, session: object) -> None:
        pass


def test_a_log_is_imported_and_learned_from(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    judged = json.loads((tmp_path / "mine" / "audit.json").read_text())["sets"]["held_out"]["by_task"]
    assert set(store.splits["heldout"]) <= judged.keys()  # no world to play: logged turns of new tasks are all there is

    monkeypatch.setattr("imagination.session.Session.world_model", lambda *_: Paying())
    assert (
        imagine(tmp_path, "train", "train.updates=1", "train.groups=4", "train.group_size=2", "train.expert_share=0")
        == 0
    )
    rows = map(json.loads, (tmp_path / "mine" / "rollouts.jsonl").read_text().splitlines())
    totals = [(sum(turn["reward"] for turn in row["turns"]), row["solved"]) for row in rows if row["source"] == "dream"]
    assert {total for total, _ in totals} == {5.0, 10.0}
    assert all(solved == (total == 10.0) for total, solved in totals)  # 5 would do where 1 is enough
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_again_adds_nothing_and_a_longer_one_only_what_is_new(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    before = {t.id: t for t in TrajectoryStore.open(tmp_path / "mine" / "log").read()}
    splits = TrajectoryStore.open(tmp_path / "mine" / "log").splits
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    assert "0 episodes added, 40 " in capsys.readouterr().out
    new = episode(0, 0) | {"task_id": "new"}
    log.write_text(f"{json.dumps(new)}\n{log.read_text()}")
    assert imagine(tmp_path, "import", "openai", str(log)) == 0
    assert "1 episodes added, 40 " in capsys.readouterr().out
    store = TrajectoryStore.open(tmp_path / "mine" / "log")
    after = {t.id: t for t in store.read()}
    assert {id_: after[id_] for id_ in before} == before  # masks included
    assert {t.task_id for id_, t in after.items() if id_ not in before} == {"new"}
    assert all(set(tasks) <= set(store.splits[split]) for split, tasks in splits.items())


def test_another_episode_of_the_same_id_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (episode(0, trial) | {"id": trial} for trial in range(2))
    assert imagine(tmp_path, "import", str(write(tmp_path / "a.jsonl", first))) == 0
    changed = first | {"messages": [*first["messages"], {"role": "assistant", "content": "go on"}]}
    for record, printed in (
        (first, "1 episodes added, 1 were in the log already"),
        (changed, "0 episodes added, 1 were"),
    ):
        assert imagine(tmp_path, "import", str(write(tmp_path / "b.jsonl", record, second))) == 0
        out = capsys.readouterr().out
        assert printed in out
        assert ("1 records refused" in out) is (record is changed)
    assert "line 1, field 'id' is '0', like that of another episode of the log" in out


def test_a_folder_is_searched_and_what_is_unknown_in_it_is_told(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "deep"
    folder.mkdir(parents=True)
    log.rename(folder / "chats.jsonl")
    (folder / "notes.md").write_text("> not an action")
    assert imagine(tmp_path, "import", "auto", str(tmp_path / "logs")) == 0
    out = capsys.readouterr().out
    assert "40 episodes added\n1 files " in out
    assert "refused.jsonl:" in out
    assert f"{folder / 'notes.md'}: " in out
    (row,) = map(json.loads, (tmp_path / "mine" / "refused.jsonl").read_text().splitlines())
    assert row["file"] == str(folder / "notes.md")


def test_equal_refusals_are_one_line_and_parts_left_out_are_counted(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": list(parts)}]}

    text, picture = {"type": "text", "text": "click"}, {"type": "image", "source": {}}
    folder = tmp_path / "logs"
    folder.mkdir()
    records = [
        episode(0, 0),
        said(text, picture),
        *(said(*[text] * k, {"type": "new"}) for k in range(7)),
        said(picture),
    ]
    write(folder / "a.jsonl", *records)
    for name in ("a.py", "b.py", "c.diff"):
        (folder / name).write_text("> look\nA lamp.")
    for again in (False, True):
        assert imagine(tmp_path, "import", "auto", str(folder)) == 0
        out = capsys.readouterr().out
        assert "8 records refused" in out
        (line,) = [line for line in out.splitlines() if "'new'" in line]
        assert line.startswith(f"  {folder / 'a.jsonl'}: line 3, field 'messages[1].content[0].type' ")
        assert line.endswith("(7 alike)")
        assert "3 files of folders left alone, .py (2), .diff (1)" in out
        assert "parts left out     image (1)" in out, again  # the log keeps the count
    assert json.loads((tmp_path / "mine" / "coverage.json").read_text())["left_out"] == {"image": 1}
    rows = (tmp_path / "mine" / "refused.jsonl").read_text().splitlines()
    assert len(rows) == 8 + 3


def test_a_column_of_a_chat_is_its_success(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [unknown(task, trial) | {"resolved": int(trial > 1)} for task in range(5) for trial in range(4)]
    for format in ("auto", "openai"):
        path = write(log, *records)
        words = ["import", format, str(path), "imports.mapping.success=resolved", f"run={format}", f"output={tmp_path}"]
        assert main(words) == 0
        assert "known in 20 episodes, 10 solved" in capsys.readouterr().out


def test_near_duplicate_tasks_stay_on_one_side_in_every_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty errands for two people each, and later for a third. Split by task, doubles would be on both sides."""
    errands = [" ".join(f"{word}{thing}{chr(97 + k)}" for word in ROOMS for thing in "xyz") for k in range(20)]

    def said(*people: str) -> list[dict[str, Any]]:
        turn = {"action": "go", "observation": "done", "reward": 1, "terminated": True}
        return [
            {"task_id": f"{person}-{k}", "start": f"{person} says: {errand} Mail {person}@example.org", "turns": [turn]}
            for k, errand in enumerate(errands)
            for person in people
        ]

    def sides() -> dict[str, set[str]]:
        splits = TrajectoryStore.open(tmp_path / "mine" / "log").splits
        return {split: {task.partition("-")[2] for task in tasks} for split, tasks in splits.items()}

    assert imagine(tmp_path, "import", "jsonl", str(write(tmp_path / "a.jsonl", *said("ada", "bob")))) == 0
    first = sides()
    assert first["train"] & first["heldout"] == set()
    assert len(first["heldout"]) == 2
    near = json.loads((tmp_path / "mine" / "coverage.json").read_text())["near_duplicates"]
    assert (near["tasks"], near["groups"]) == (40, 20)
    assert near["leaks_if_split_by_task"] > 0
    assert "40 tasks in 20 groups" in capsys.readouterr().out
    assert imagine(tmp_path, "import", "jsonl", str(write(tmp_path / "b.jsonl", *said("eve")))) == 0
    assert sides() == first  # what comes later goes where its double is


def test_what_is_refused_is_named_and_counted_and_the_rest_goes_on(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(f'{{"messages": 3}}\nno json\n{log.read_text()}')
    quoting = write(tmp_path / "b.jsonl", {"messages": [{"role": "bob@example.org", "content": "x"}]})
    assert main(["import", "openai", str(log), str(quoting), "run=masked", f"output={tmp_path}"]) == 0
    assert "bob@example.org" not in capsys.readouterr().out + (tmp_path / "masked" / "refused.jsonl").read_text()
    assert imagine(tmp_path, "import", "openai", str(log), "imports.mask=false") == 0
    out = capsys.readouterr().out
    assert "40 episodes added\n2 records refused" in out
    assert "refused.jsonl:" in out
    assert f"{log}: line 1, field 'messages' " in out
    rows = [json.loads(line) for line in (tmp_path / "mine" / "refused.jsonl").read_text().splitlines()]
    assert [(row["record"], row["field"]) for row in rows] == [("line 1", "messages"), ("line 2", "")]
    assert "not masked" in out
    assert "ada@example.org" in repr(list(TrajectoryStore.open(tmp_path / "mine" / "log").read()))


def test_unknown_success_is_said_and_not_guessed(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{k: v for k, v in episode(t, 0).items() if k != "reward"} for t in range(5)]
    assert imagine(tmp_path, "import", "auto", str(write(log, *points))) == 0
    out = capsys.readouterr().out
    assert "known in 0 episodes, 0 solved" in out
    assert "unknown in 5 of 5 episodes" in out
    assert [t.success for t in TrajectoryStore.open(tmp_path / "mine" / "log").read()] == [None] * 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "`imagine import my-log.jsonl "),
        (["auto", "none.json"], "none.json cannot be read: "),
        (["opena", "{log}"], "'opena'; did you mean 'openai'?"),
        (["intercode", "{log}"], "{log}: line 1, field 'turn_history'"),
        (["openai", "{log}", "imports.heldout=1"], "imports: heldout "),
        (["openai", "{log}", "imports.solved_at=inf"], "imports: solved_at "),
        (["openai", "{log}", "{log}.no.gz"], "{log}.no.gz"),  # after a file that can
        (["huggingface", "{log}", "imports.mapping.acton=a"], "imports.mapping names 'acton'"),
        (["openai", "{log}", "imports.mapping.action=a"], "imports.mapping.action does nothing in the format openai"),
        (
            ["auto", "{log}", "imports.mapping.start=goal"],
            "imports.mapping.start does nothing without imports.mapping.a",
        ),
        (["auto", "{log}", "imports.mapping.success=solvd"], "{log}: line 1, field 'solvd' is no column"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, log: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{log}.no.gz").write_bytes(b"no gzip")
    assert imagine(tmp_path, "import", *(word.format(log=log) for word in words)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said.format(log=log) in line
    assert not (tmp_path / "mine" / "log").exists()
    assert not (tmp_path / "mine" / "incoming").exists()


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
    # 400 characters by two; and train wants room for twelve such actions
    needs = f"imagine fit-world-model run=mine output={tmp_path} policy.context=3136 max_action_tokens=256"
    assert needs in capsys.readouterr().out


def test_the_next_commands_work_as_they_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agents = ["it's", "gpt-4o (a, b)", "42"]
    records = [
        {"task_id": f"t{k % 5}", "agent": agents[k % 3], "start": "Go.", "turns": [{"action": "a", "observation": "b"}]}
        | {"success": k < 25}
        for k in range(30)
    ]
    out = tmp_path / "my runs, a=b $x"
    assert main(["import", str(write(tmp_path / "a.jsonl", *records)), "run=mine", f"output={out}"]) == 0
    lines = [line for line in capsys.readouterr().out.partition("next:\n")[2].splitlines() if "imagine " in line]
    assert [shlex.split(line)[1] for line in lines] == ["fit-world-model", "clone", "train", "audit"]
    for line in lines:
        command, *words = shlex.split(line)
        assert command == "imagine"
        assert main([*words, "--dry-run"]) == 0
        shown = capsys.readouterr().out
        assert f"in {out / 'mine'}:\n" in shown
        if words[0] == "clone":
            cloned = yaml.safe_load(shown.partition("\nin ")[0])["clone"]
            assert sorted(cloned["agents"]) == sorted(agents)
            assert cloned["solved_only"], "25 of 30 are known to have solved their task"


def test_a_log_without_rewards_is_fitted_to_by_the_goal_that_its_next_command_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"action": "open it", "observation": "It opens."}, {"action": "look", "observation": "A room."}]
    records = [{"task_id": f"t{k % 5}", "agent": "expert", "start": "Go.", "turns": turns} for k in range(10)]
    assert imagine(tmp_path, "import", "auto", str(write(tmp_path / "a.jsonl", *records)), "preset=tiny") == 0
    printed = capsys.readouterr().out.partition("next:\n")[2]
    assert "worldmodel.goal.observation=PATTERN" in printed
    assert "train.expert_share=0" in printed
    assert imagine(tmp_path, "fit-world-model", "fit.steps=1") == 2
    assert "worldmodel.goal.observation=PATTERN" in capsys.readouterr().err
    assert imagine(tmp_path, "fit-world-model", "fit.steps=1", "worldmodel.goal.observation=opens") == 0


def test_a_log_may_have_any_name_and_home_may_be_a_tilde(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word that is a file is a file, even where it looks like a setting."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    names = (
        "step=10.jsonl|epoch=3-step=10 (1).jsonl|seed=1|end\\|end\\\\|${oc.env:HOME}.jsonl|\\${seed}|$HOME|~.jsonl|null"
    )
    names += "|it's|a\"b|[1]|{x}|100%,b.jsonl|auto-x|日志"
    for name in names.split("|"):
        (tmp_path / name).write_bytes(log.read_bytes())
    words = ["import", *names.split("|"), "run=mine", "output=~/runs"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for name in names.split("|"):
        assert f"{name}: openai, as" in out
    assert json.loads((tmp_path / "home/runs/mine/coverage.json").read_text())["episodes"] == 40 * 17
    assert not (tmp_path / "~").exists()
    (tmp_path / "home" / "log.jsonl").write_bytes(log.read_bytes())
    assert main(["import", "openai", "~/log.jsonl", "run=mine", "output=~/runs"]) == 0
    assert "40 episodes added" in capsys.readouterr().out


def unknown(task: int, trial: int) -> dict[str, Any]:
    return {key: value for key, value in episode(task, trial).items() if key != "reward"}


def test_a_judge_decides_what_is_unknown_once_it_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right but for trial 2, which it takes for solved, trial 1, of which it babbles, and 3, where it is away."""
    away = True

    def answer(text: str) -> Answer:
        if "Trial 1." in text:
            return says("hard to say")
        if "Trial 3." in text and away:
            return 503, {}
        return says(json.dumps({"success": "is closed" in text or "Trial 2." in text}))

    known = [episode(task, trial) | {"success": (task + trial) % 2 == 0} for task in range(5) for trial in (0, 2)]
    path = write(tmp_path / "a.jsonl", *known, *(unknown(task, trial) for task in range(5) for trial in (4, 1, 3)))
    words = ["imports.judge.model=m", "imports.judge.key_env=OUR_KEY", "imports.judge.retries=0"]
    monkeypatch.setenv("OUR_KEY", "k1")
    with judge(answer) as server:
        words.append(f"imports.judge.url={server.url}")
        assert imagine(tmp_path, "import", "auto", str(path), *words) == 0
        out = capsys.readouterr().out
        assert server.keys == {"Bearer k1"}
        assert not any("ada@example.org" in text for text in server.asked)  # masked before it is sent
        assert len(server.asked) == 25
        assert "20 episodes added" in out
        assert "judge m: 3 solved, 2 not" in out  # trial 4 of tasks 0, 2 and 4
        assert "failures: 5 malformed, 0 refused, 5 unreachable" in out
        assert "5 episodes got no verdict" in out
        assert "5 episodes got no answer" in out
        # known: 6 of 10 are solved; it says so of these, and of trial 2 of tasks 1 and 3
        found = json.loads((tmp_path / "mine" / "coverage.json").read_text())["judge"]
        assert (found["accuracy"]["success"], found["accuracy"]["n"]) == (0.8, 10)
        assert (found["precision"]["n"], found["recall"]["success"], found["recall"]["n"]) == (8, 1.0, 6)
        low, high = found["accuracy"]["ci95"]
        assert (round(low, 3), round(high, 3)) == (0.490, 0.943)  # Wilson's for 8 of 10
        log = {
            t.task_id + t.turns[-1].observation[-2]: t for t in TrajectoryStore.open(tmp_path / "mine" / "log").read()
        }
        assert (log["04"].success, log["04"].turns[-1].reward, log["14"].success) == (True, 1.0, False)
        assert (log["01"].success, log["01"].turns[-1].reward) == (None, None)
        assert log["04"].turns[-1].info["log.judged_by"] == "judge m"
        away = False
        server.asked.clear()
        assert imagine(tmp_path, "import", "auto", str(path), *words) == 0
        assert "5 episodes added, 20 " in capsys.readouterr().out
        assert len(server.asked) == 5  # those that nobody answered for
        server.asked.clear()
        assert imagine(tmp_path, "import", "auto", str(path), *words) == 0
        assert server.asked == []
    assert imagine(tmp_path, "import", "auto", str(path), "imports.judge.url=") == 2
    assert "was imported with {'judged_by': 'judge m'}" in capsys.readouterr().err


def test_a_goal_decides_by_patterns_and_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = [episode(task, 0) | {"success": task % 2 == 0} for task in range(5)]
    path = write(tmp_path / "a.jsonl", *known, *(unknown(task, 1) for task in range(5)))
    assert imagine(tmp_path, "import", "auto", str(path), "imports.goal.observation=is closed") == 0
    out = capsys.readouterr().out
    assert "is closed: 2 solved, 3 not" in out
    assert "known success: accuracy 1.00" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["imports.judge.url=http://127.0.0.1:9/v1"], "imports.judge.model is missing"),
        (
            ["imports.judge.url=http://127.0.0.1:9/v1", "imports.judge.model=m", "imports.goal.observation=x"],
            "one of them",
        ),
        (
            ["imports.judge.url=http://127.0.0.1:9/v1", "imports.judge.model=m", "imports.judge.key_env=NONE_X"],
            "NONE_X",
        ),
        (
            ["imports.judge.url=http://127.0.0.1:9/v1", "imports.judge.model=m", "imports.judge.retries=0"],
            "imports.judge: http://127.0.0.1:9/v1/chat/completions ",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_an_error_before_anything_is_written(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", episode(0, 0) | {"success": True}, unknown(1, 0))
    assert imagine(tmp_path, "import", "auto", str(path), *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mine" / "log").exists()
