"""If these fail, a rule that a language model made up answers in dreams, or a true one is thrown away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.cli import main
from real_envs.chat_server import ChatServer
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Turn
from tests.support.judging import judge, says
from tests.support.rooms_world import rooms_log
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.propose import ask_for_rules, holding, read_proposals, unanswered_turns
from worldmodel.rules.rule_set import RuleSet
from worldmodel.rules.templates import ANY

LOG = rooms_log(100)
WALL = {
    "template": "go {1}",
    "conditions": [{"kind": "text", "slot": 1, "value": "to the _", "scope": "you stand in", "negated": True}],
    "copy": {"kind": "say", "text": "You cannot do that."},
}
EVERY_MOVE = WALL | {"conditions": []}  # refused now and then, not always
UNKNOWN = WALL | {"template": "fly {1}"}
NO_TEXT = WALL | {"conditions": [{"kind": "text", "slot": 1, "value": ["to the _"], "scope": "last"}]}
NO_SLOT = WALL | {"copy": {"kind": "say", "text": "No {2}."}}
FROM_BEHIND = WALL | {"template": ANY, "conditions": [{"kind": "is", "slot": -2, "value": "hall"}]}


@pytest.fixture(scope="module")
def fewer() -> RuleSet:
    """The rules of the rooms without those that refuse a move."""
    rules = mine_rules(LOG)
    kept = [rule for rule in rules.rules if not (rule.template in ("go {1}", ANY) and rule.refuses)]
    assert len(kept) < len(rules.rules)
    return RuleSet(rules.language, kept, rules.invariants)


def test_only_what_the_language_can_say_is_read(fewer: RuleSet) -> None:
    lines = [
        json.dumps(WALL),
        json.dumps(UNKNOWN),
        json.dumps(NO_SLOT),
        json.dumps(NO_TEXT),
        json.dumps(FROM_BEHIND),
        '{"template": 3}',
        "import os",
        "{broken}",
    ]
    rules, wrong = read_proposals(fewer, "Here they are:\n" + "\n".join(lines))
    assert [rule.template for rule in rules] == ["go {1}"]
    assert rules[0].refuses
    assert wrong == 6


def test_a_proposal_is_judged_by_the_log(fewer: RuleSet) -> None:
    proposed, _ = read_proposals(fewer, f"{json.dumps(EVERY_MOVE)}\n{json.dumps(WALL)}")
    kept = holding(fewer, proposed, LOG)
    assert [str(rule).split(" -> ")[0] for rule in kept] == [
        'go {1}: if not "to the {1}" stands in the last text that begins "you stand in"'
    ]
    assert (kept[0].exceptions, kept[0].held_exceptions) == (0, 0)
    refused = [turn for t in LOG for turn in t.turns if turn.action[:2] == "go" and "cannot" in turn.observation]
    assert kept[0].turns + kept[0].held_turns == len(refused), "plain counting over the log"


@pytest.mark.parametrize("condition", [{"kind": "is", "slot": 2, "value": "hall"}, None])
def test_a_proposal_for_any_action_needs_the_slots_that_it_names(fewer: RuleSet, condition: dict[str, object]) -> None:
    """Moves have one."""
    copy = {"kind": "link", "text": "you stand in", "slot": 2, "between": "lies"}
    proposal = {
        "template": ANY,
        "conditions": [condition] if condition else [],
        "copy": WALL["copy"] if condition else copy,
    }
    proposed, wrong = read_proposals(fewer, json.dumps(proposal))
    assert (len(proposed), wrong, holding(fewer, proposed, LOG)) == (1, 0, [])


def test_a_proposal_pays_only_for_what_the_log_saw_pay() -> None:
    """Only coins and gems were ever taken, and each time that paid. A policy would find that doors pay, too."""
    log = [
        replace(LOG[0], id=f"e{k}", task_id=f"t{k}", turns=(Turn(f"take {thing}", "Taken.", 1.0, True),))
        for k, thing in enumerate(("coin", "gem") * 400)
    ]
    bare = RuleSet(mine_rules(log).language, [])
    pays = WALL | {"template": "take {1}", "conditions": [], "reward": 1, "terminated": True}
    proposed, _ = read_proposals(bare, json.dumps(pays | {"copy": {"kind": "say", "text": "Taken."}}))
    kept = RuleSet(bare.language, holding(bare, proposed, log))
    assert kept.answer(log[0].start, (), "take gem") is not None
    assert kept.answer(log[0].start, (), "take door") is None


def test_what_the_evidence_says_is_counted_and_never_believed(fewer: RuleSet) -> None:
    boast = EVERY_MOVE | {"turns": 10_000, "held_turns": 10_000}
    rules, _ = read_proposals(fewer, json.dumps(boast))
    assert rules[0].turns == 0
    assert holding(fewer, rules, LOG) == []


def test_a_proposal_answers_only_where_no_earlier_rule_does(fewer: RuleSet) -> None:
    """It was judged there alone."""
    proposed, _ = read_proposals(fewer, f"{json.dumps(WALL | {'template': ANY, 'conditions': []})}\n{json.dumps(WALL)}")
    answer = RuleSet(fewer.language, proposed).answer(LOG[0].start, (), "go nowhere")
    assert answer is not None
    assert answer.rule == proposed[0]


def test_it_is_shown_turns_that_no_rule_answers(fewer: RuleSet) -> None:
    for episode, k in unanswered_turns(fewer, LOG)[::50]:
        assert fewer.answer(episode.start, episode.turns[:k], episode.turns[k].action) is None
    unmeasured = [replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns)) for t in LOG]
    assert unanswered_turns(fewer, unmeasured) == []
    with judge(lambda asked: says(json.dumps(WALL))) as server:
        found = ask_for_rules(fewer, LOG, ChatServer(server.url, "m", backoff=0.0), 2, seed=0)
    assert (found.questions, found.failed, found.proposed, len(found.rules)) == (2, 0, 1, 1)
    assert "go {1}" in server.asked[0]
    assert server.asked[0].count("The action to foretell: ") == 12


def test_a_server_that_does_not_answer_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine" / "log"
    tasks = sorted({t.task_id for t in LOG})
    store = TrajectoryStore.create(folder, {"train": tasks, "heldout": []}, meta={"environment": "rooms"})
    store.append(LOG[:40])
    words = ["rules", "run=mine", f"output={tmp_path}", "rules.model=m", "rules.retries=0", "rules.questions=1"]
    assert main([*words, "rules.url=http://127.0.0.1:9/v1"]) == 2
    assert "rules.url: " in capsys.readouterr().err
    with judge(lambda asked: says(json.dumps(WALL))) as server:
        assert main([*words, f"rules.url={server.url}"]) == 0
    assert "m proposed 1 rules in 1 answers" in capsys.readouterr().err
    assert RuleSet.load(tmp_path / "mine" / "models") is not None
