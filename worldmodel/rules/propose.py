"""Rules that somebody proposes, a language model say, beside those found by counting; judged by the same test.

A proposal is JSON in the closed language of ``conditions.py``: it cannot run anything, and what does not hold in the
log is thrown away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from real_envs.chat_server import ChatServer
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.rules.conditions import Rule
from worldmodel.rules.mine import within_evidence
from worldmodel.rules.rule_set import RuleSet
from worldmodel.rules.search import LEAST_TURNS, PRECISION, judging_half, lower_bound
from worldmodel.rules.templates import ANY

_EXAMPLES = 12  # turns that a question shows
_BEFORE = 6  # turns before each
_TOKENS = 2000  # of an answer
_TASK = """You find rules by which a text world answers actions. Write each rule as one JSON object on a line of its
own, and nothing else. Keys:
"template": the form of the action, one of those listed; {1}, {2} are its slots. "**" is any that has a slot.
"conditions": a list of at most three, all of which must hold before the action. Each is an object with "kind" and
  {"kind":"text","slot":1,"value":"to the _","scope":S}: the words, with the filler of the slot for _, stand in a text.
    S is "start" (the first text), "last" (the last one), "state" (the last that refused nothing), "seen" (any), or a
    listed opening: the last text that begins so. With "slot":0 the words stand for themselves.
  {"kind":"missing","scope":S}: something that the action names does not stand in that text.
  {"kind":"is","slot":1,"value":"coin"}: the filler is this.
  {"kind":"last_deed","slot":1,"value":"take {1}","other":1}: the last accepted action that named the filler had it in
    slot "other" of this template.
  {"kind":"did","slot":1,"value":"open {1}","other":1}: some accepted action had it there.
  {"kind":"done","value":"inventory"}: an action of the template was accepted.
  {"kind":"paid"}: this very action earned a reward before.
  "negated": true turns a condition round.
"copy": the answer. {"kind":"say","text":"You take the {1}."}, or {"kind":"last","text":opening}: the last text that
  begins so, again, or {"kind":"again"}: what the same action was answered before, or {"kind":"way","text":opening}: the
  text of the place where this action led before.
"reward": a number, "terminated": true or false.
Words in conditions are lower case, with a space before punctuation. Propose what holds always, in other tasks too."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """What became of proposals.

    Attributes:
        questions, failed: how many were asked, and how many nobody answered; ``reason`` of the last of them.
        proposed, invalid: rules in the answers, and lines that are none in the closed language.
    """

    rules: tuple[Rule, ...]
    questions: int
    failed: int
    reason: str
    proposed: int
    invalid: int


def ask_for_rules(
    rules: RuleSet, log: Sequence[Trajectory], server: ChatServer, questions: int, seed: int
) -> Proposals:
    """Shows a language model turns that no rule answers, and keeps those of its rules that hold on the log."""
    open_turns = unanswered_turns(rules, log)
    rng = random.Random(derive_seed("propose rules", seed))
    proposed: dict[Rule, None] = {}
    failed = invalid = asked = 0
    reason = ""
    for _ in range(questions if open_turns else 0):
        asked += 1
        shown = rng.sample(open_turns, min(_EXAMPLES, len(open_turns)))
        reply = server.ask(server.question(_TASK, _described(rules, shown), _TOKENS))
        if reply.text is None:
            failed, reason = failed + 1, reply.reason
            continue
        read, wrong = read_proposals(rules, reply.text)
        proposed |= dict.fromkeys(read)
        invalid += wrong
    kept = holding(rules, list(proposed), log)
    return Proposals(tuple(kept), asked, failed, reason, len(proposed), invalid)


def unanswered_turns(rules: RuleSet, log: Sequence[Trajectory]) -> list[tuple[Trajectory, int]]:
    """Turns of the half that rules are found in which no rule answers."""
    held = judging_half(log)
    turns = []
    for trajectory in log:
        if trajectory.id in held:
            continue
        for k, turn in enumerate(trajectory.turns):
            history = trajectory.turns[:k]
            if turn.known and rules.answer(trajectory.start, history, turn.action, trajectory.id) is None:
                turns.append((trajectory, k))
        rules.release(trajectory.id)
    return turns


def _described(rules: RuleSet, shown: Iterable[tuple[Trajectory, int]]) -> str:
    parts = [
        "Templates: " + json.dumps(rules.language.templates.texts),
        "Openings: " + json.dumps(rules.language.kinds),
    ]
    for number, (episode, k) in enumerate(shown, start=1):
        before = [f"> {t.action}\n{t.observation}" for t in episode.turns[max(0, k - _BEFORE) : k]]
        turn = episode.turns[k]
        outcome = f"(reward {turn.reward:g}{', the end' if turn.terminated else ''})"
        answer = f"The action to foretell: {turn.action}\nThe answer: {turn.observation} {outcome}"
        parts.append("\n".join([f"Example {number}. The first text: {episode.start}", *before, answer]))
    return "\n\n".join(parts)


def read_proposals(rules: RuleSet, text: str) -> tuple[list[Rule], int]:
    """The rules in an answer, and how many of its objects are none in this log's language."""
    rules_read, invalid = [], 0
    for line in text.splitlines():
        begin = line.find("{")
        if begin < 0:
            continue
        try:
            data = json.loads(line[begin : line.rindex("}") + 1])
            rule = Rule.from_json(_filled(data))
            rule.check(rules.language)
        except (ValueError, KeyError, TypeError, AttributeError):
            invalid += 1
            continue
        answer = rule.copy.text if rule.copy.kind == "say" else ""
        rules_read.append(replace(rule, refuses=bool(answer) and rules.language.refuses(rule.template, answer)))
    return rules_read, invalid


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    """With what a proposal need not say."""
    kept = {key: data[key] for key in ("template", "conditions", "copy")}
    return kept | {
        "reward": float(data.get("reward", 0.0)),
        "terminated": bool(data.get("terminated", False)),
        "refuses": False,
    }


def holding(rules: RuleSet, proposed: Sequence[Rule], log: Sequence[Trajectory]) -> list[Rule]:
    """The proposals that hold, by the test of those that are mined (``mine.py``).

    On turns that no rule before them answers, they answer ``LEAST_TURNS`` of the one half, and are right on the other
    with a precision whose lower bound is at least ``PRECISION``.
    """
    held = judging_half(log)
    answered: dict[Rule, dict[tuple[str, int], bool]] = {rule: {} for rule in proposed}  # by turn: right or wrong
    fillers: dict[tuple[str, int], tuple[str, ...]] = {}
    for trajectory in log:
        for k, turn in enumerate(trajectory.turns):
            action, history = rules.language.templates.read(turn.action), trajectory.turns[:k]
            of = {action.template, *([ANY] if action.fillers else [])}
            candidates = [rule for rule in answered if rule.template in of]
            if not turn.known or not candidates:
                continue
            if rules.answer(trajectory.start, history, turn.action, trajectory.id) is not None:
                continue
            episode = rules.episode(trajectory.start, history, trajectory.id)
            fillers[trajectory.id, k] = action.fillers
            for rule in candidates:
                if (answer := rule.answer(episode, action)) is not None:
                    answered[rule][trajectory.id, k] = rule.is_right(answer, turn)
        rules.release(trajectory.id)
    kept: list[Rule] = []
    while answered:
        good = [rule for rule in (_counted(rule, turns, held) for rule, turns in answered.items()) if _holds(rule)]
        if not good:
            break
        best = max(good, key=lambda rule: rule.turns)
        covered = next(turns for rule, turns in answered.items() if _same(rule, best))
        kept.append(replace(best, conditions=within_evidence(best, [fillers[at] for at in covered])))
        answered = {
            rule: {at: right for at, right in turns.items() if at not in covered}
            for rule, turns in answered.items()
            if not _same(rule, best)
        }
    return kept


def _counted(rule: Rule, turns: Mapping[tuple[str, int], bool], held: Container[str]) -> Rule:
    one_half = [right for (name, _), right in turns.items() if name not in held]
    other_half = [right for (name, _), right in turns.items() if name in held]
    return replace(
        rule,
        turns=len(one_half),
        exceptions=one_half.count(False),
        held_turns=len(other_half),
        held_exceptions=other_half.count(False),
    )


def _holds(rule: Rule) -> bool:
    right = rule.held_turns - rule.held_exceptions
    fits = rule.exceptions <= (1 - PRECISION) / 2 * rule.turns
    return rule.turns >= LEAST_TURNS and fits and lower_bound(right, rule.held_turns) >= PRECISION


def _same(one: Rule, other: Rule) -> bool:
    return (one.template, one.conditions, one.copy) == (other.template, other.conditions, other.copy)
