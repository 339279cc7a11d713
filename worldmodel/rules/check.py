"""How rules do on real episodes that they were not mined from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from real_envs.trajectory import Trajectory
from worldmodel.rules.rule_set import RuleSet


def check_rules(rules: RuleSet, episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """
    Returns:
        ``rules``, ``refusing``: how many there are; ``turns`` with a known reward, ``answered`` of them by a rule,
        ``wrong`` of those (text, reward or end); ``worded`` further ones whose words a rule knows and not the outcome,
        ``misworded`` of those; ``refused`` turns and ``refused_by_rule``; ``by_rule``: turns and
        errors of each that answered.
    """
    turns = answered = wrong = refused = refused_by_rule = worded = misworded = 0
    used, errors = Counter[str](), Counter[str]()
    for trajectory in episodes:
        for k, turn in enumerate(trajectory.turns):
            if turn.reward is None:
                continue
            turns += 1
            refuses = rules.language.refuses(turn.action, turn.observation)
            refused += refuses
            before = (trajectory.start, trajectory.turns[:k], turn.action, trajectory.id)
            found = rules.answer(*before)
            if found is None:
                if (said := rules.words(*before)) is not None:
                    worded += 1
                    misworded += not said.rule.is_right(said.observation, turn)
                continue
            answered += 1
            rule = found.rule
            used[str(rule)] += 1
            right = rule.is_right(found.observation, turn)
            wrong += not right
            errors[str(rule)] += not right
            refused_by_rule += refuses and rule.refuses
        rules.release(trajectory.id)
    return {
        "rules": len(rules.rules),
        "refusing": sum(rule.refuses for rule in rules.rules),
        "turns": turns,
        "answered": answered,
        "wrong": wrong,
        "worded": worded,
        "misworded": misworded,
        "refused": refused,
        "refused_by_rule": refused_by_rule,
        "by_rule": {text: {"turns": n, "wrong": errors[text]} for text, n in used.most_common()},
    }
