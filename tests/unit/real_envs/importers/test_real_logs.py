"""Real logs, where they lie beside the project: the facts that their README states. If these fail, an importer lies."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import Imported, RejectedRecord, find_format, read
from real_envs.importers.outcomes import with_outcome
from real_envs.trajectory import StopReason, Trajectory

DATA = Path(__file__).resolve().parents[5] / "shared" / "data"
TAU = DATA / "tau_bench" / "gpt-4o-airline.json"
SHOP = DATA / "webshop_react" / "WebShop.ipynb"
HOUSE = DATA / "alfworld_adapt" / "ADaPT_maxd3_alfworld_text_davinci_003.json"
CODE = DATA / "intercode" / "bash"
WEB = DATA / "webarena_infinity" / "gmail"


@cache
def imported(path: Path) -> tuple[str, Sequence[Trajectory], Sequence[RejectedRecord]]:
    """The format that is seen, the episodes, and what is refused; the test is skipped where the file is not there."""
    if not path.exists():
        pytest.skip("the logs are not beside this checkout")
    found, _ = find_format("auto", path)
    items = list(read(path, found, Reading()))
    return (
        found.name,
        [item.episode for item in items if isinstance(item, Imported)],
        [item for item in items if isinstance(item, RejectedRecord)],
    )


def test_tau_bench() -> None:
    name, episodes, refused = imported(TAU)
    assert (name, len(episodes), refused) == ("openai", 200, [])
    assert sum(episode.solved for episode in episodes) == 84
    assert sum(episode.total_reward == 0 for episode in episodes) == 116
    # what the simulated user was told is the world's alone
    assert all(e.world_facts[0].startswith(("You", "Your")) and e.world_facts[0] not in e.start for e in episodes)
    # every message is in the start, an action or an answer
    messages = [message for record in json.loads(TAU.read_text()) for message in record["traj"]]
    assert len(messages) == 5308
    roles = Counter(message["role"] for message in messages)
    assert sum(len(episode.turns) for episode in episodes) == roles["assistant"]
    answers = Counter(turn.observation for episode in episodes for turn in episode.turns)
    first = {(r["task_id"], r["trial"]): r["traj"][1]["content"] for r in json.loads(TAU.read_text())}
    for message in messages:
        if message["role"] in ("user", "tool"):
            answers[message["content"]] -= 1
    assert sum(-count for count in answers.values() if count < 0) == len(first) == 200  # the users' first words


def test_webshop() -> None:
    """Of the README's 3,436 steps and 1,088 thoughts one is missing: a warning stands before it in the notebook."""
    name, episodes, refused = imported(SHOP)
    assert (name, len(episodes), refused) == ("react", 500, [])
    turns = [turn for episode in episodes for turn in episode.turns]
    assert len(turns) == 3436 + 1
    assert sum(turn.action.startswith("think[") for turn in turns) == 1088 + 1
    assert sum(turn.observation == "Invalid action!" for turn in turns) == 310
    scores = [next((turn.reward for turn in reversed(episode.turns)), None) for episode in episodes]
    kinds = Counter("none" if s is None else "one" if s == 1 else "zero" if s == 0 else "partial" for s in scores)
    assert kinds == {"one": 179, "partial": 265, "zero": 16, "none": 40}
    assert sum(episode.total_reward for episode in episodes) / 500 == pytest.approx(0.63798, abs=5e-6)
    assert sum(episode.solved for episode in episodes) / 500 == 0.358
    printed = "".join("".join(o["text"]) for c in json.loads(SHOP.read_text())["cells"] for o in c.get("outputs", ()))
    assert len(re.findall(r"\n\nAction: think\[", printed)) == 1088
    assert len(re.findall(r"^Action: ", printed, re.MULTILINE)) - 500 == len(turns)


def test_webshop_with_a_threshold() -> None:
    """What is stated by the success rates stays; without them the threshold would count partial rewards, too."""
    _, episodes, _ = imported(SHOP)
    assert sum(with_outcome(episode, 0.5).solved for episode in episodes) == 179


def test_alfworld_of_adapt() -> None:
    """The README counts actions that begin with ">"; the first of each part of a plan does not."""
    name, episodes, refused = imported(HOUSE)
    assert name == "commands"
    assert sum(episode.solved for episode in episodes) == 107
    failures = sum(not episode.solved for episode in episodes)
    empty = [refusal for refusal in refused if refusal.reason == "has no action"]
    assert (failures, len(empty), failures + len(empty)) == (21, 6, 27)
    assert [refusal.record for refusal in refused if refusal not in empty] == ["record 'overall'"]
    actions = [turn.action for episode in episodes for turn in episode.turns if not turn.action.startswith("think:")]
    records = [e for kind in json.loads(HOUSE.read_text()).values() for e in kind.values() if isinstance(e, dict)]
    marked = [line for e in records for line in e["trace"].splitlines() if re.match(r"> (?!think:)\S", line)]
    unmarked = [line for e in records for line in e["trace"].splitlines() if re.match(r" (?!think:)\S", line)]
    assert (len(marked), len(actions)) == (1432, 1432 + len(unmarked))
    assert len({episode.task_id for episode in episodes}) == 128


@pytest.mark.parametrize(
    ("file", "turns", "solved"),
    [
        ("gpt-3.5/ic_bash_multiturn_gpt-3.5_10_turns_fs_1.json", 380, 27),
        ("gpt-3.5/ic_bash_react_10_turns_fs_1.json", 290, 13),
        ("gpt-4/ic_bash_multiturn_gpt-4_10_turns_fs_1.json", 401, 25),
        ("vicuna/ic_bash_multiturn_vicuna_10_turns_fs_1.json", 530, 9),
    ],
)
def test_intercode(file: str, turns: int, solved: int) -> None:
    name, episodes, refused = imported(CODE / file)
    assert (name, len(episodes), refused) == ("intercode", 60, [])
    assert sum(len(episode.turns) for episode in episodes) == turns
    assert sum(episode.solved for episode in episodes) == solved
    last = [record["turn_history"]["rewards"][-1] for record in json.loads((CODE / file).read_text()).values()]
    assert [episode.total_reward for episode in episodes] == pytest.approx(last)


def test_webarena() -> None:
    runs = [imported(folder) for folder in sorted(WEB.glob("*"))] or [imported(WEB)]
    assert {name for name, _, _ in runs} == {"browser-use"}
    for folder, (_, episodes, refused) in zip(sorted(WEB.glob("*")), runs, strict=True):
        told = json.loads((folder / "results.json").read_text())
        assert sum(episode.solved for episode in episodes) == told["passed"]
        assert len(episodes) + len(refused) == told["total"]
        assert all(episode.stop is StopReason.TERMINATED for episode in episodes)
        for episode in episodes:
            for page in (episode.start, *(turn.observation for turn in episode.turns[:-1])):
                numbers = [int(number) for number in re.findall(r"\[(\d+)\]<", page)]
                assert sorted(set(numbers)) == list(range(1, len(set(numbers)) + 1))
