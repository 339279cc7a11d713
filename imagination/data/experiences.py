"""Experiences: short texts in a policy's prompt, learned from groups of episodes while no weight changes.

Training-free GRPO (Cai et al. 2025, arXiv 2510.08191): what sets an episode apart from its group is no number but what
a language model says of it, as changes of a list that the policy reads. The paper asks for a summary of each episode
first, and for changes of a whole batch at once; here one question shows a group as it was played.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagination.settings import UserError
from policy.lm.render import ChatFormat
from real_envs.files import read_json
from real_envs.importers.outcomes import shown
from real_envs.trajectory import Trajectory

FILE = "experience.json"  # under models/
TASK = """You help an agent to do better without training it. You see attempts of the agent at one task, each with what
it earned, and the numbered experiences that it reads before it acts. Find out what the best attempts did that the worst
did not, and change the list so that later attempts do better, at other tasks of this kind, too. An experience is one
general sentence of at most 32 words. Answer with one JSON list of changes and nothing else; [] changes nothing:
[{"operation": "add", "text": "..."}, {"operation": "modify", "number": 2, "text": "..."},
{"operation": "delete", "number": 3}]"""
_EPISODE, _OPENING = 4000, 100  # characters of an episode in a question, and of a task by which ``contrast`` names it


def question(episodes: Sequence[Trajectory], experiences: Sequence[str]) -> str:
    """What the language model is shown of a group, the best attempts first."""
    ranked = sorted(episodes, key=lambda episode: -episode.total_reward)
    attempts = [f"ATTEMPT, earned {episode.total_reward:g}\n{shown(episode, _EPISODE)}" for episode in ranked]
    return "\n\n".join([f"EXPERIENCES:\n{_numbered(experiences) or 'none yet'}", *attempts])


def changed(experiences: Sequence[str], answer: str, most: int) -> tuple[list[str], int]:
    """The list after the changes in an answer, whose numbers are those of the list before, from 1 on.

    No text is there twice, and only the first ``most`` are kept.

    Returns:
        ``(experiences, invalid)``: how many entries of the answer are no change; 1 for an answer that is no JSON list.

    Example::

        changed(["a", "b"], '[{"operation": "delete", "number": 1}, {"operation": "add", "text": "c"}]', 9)
        # ["b", "c"], 0
    """
    entries, invalid = list(experiences), 0
    try:
        changes = json.loads(answer[answer.index("[") : answer.rindex("]") + 1])
    except ValueError:
        return entries, 1
    for change in changes:
        fields: Mapping[str, Any] = change if isinstance(change, dict) else {}
        operation, number, text = (fields.get(key) for key in ("operation", "number", "text"))
        words = " ".join(text.split()) if isinstance(text, str) and operation != "delete" else ""
        if operation == "add" and words:
            entries.append(words)
        elif type(number) is int and 1 <= number <= len(experiences) and operation == ("modify" if words else "delete"):
            entries[number - 1] = words
        else:
            invalid += 1
    return [entry for entry in dict.fromkeys(entries) if entry][:most], invalid


def contrast(episodes: Sequence[Trajectory]) -> str:
    """An answer without a language model: the action that most sets the best of at least one episode from the worst.

    It has the greatest difference between the shares of the best and of the worst that did it, and is the first of
    several; nothing is added where no difference is above 0.
    """
    returns = [episode.total_reward for episode in episodes]
    best, worst = ([e for e in episodes if e.total_reward == bound] for bound in (max(returns), min(returns)))

    def apart(action: str) -> float:
        shares = [sum(any(t.action == action for t in e.own_turns) for e in some) / len(some) for some in (best, worst)]
        return shares[0] - shares[1]

    action = max((turn.action for episode in best for turn in episode.own_turns), key=apart, default="")
    opening = " ".join(episodes[0].start.split())[:_OPENING]
    text = f'Where it says "{opening}": the best attempts did "{action}", the worst did not.'
    return json.dumps([{"operation": "add", "text": text}] if apart(action) > 0 else [])


def prefaced(chat: ChatFormat, experiences: Sequence[str]) -> ChatFormat:
    """The chat with the list before the first observation; its tokens are of the scaffold, which nobody trains on."""
    chat = copy.copy(chat)
    if experiences:
        chat.opening += chat.encode(f"Experiences of earlier attempts:\n{_numbered(experiences)}\n\n")
    return chat


def read_experiences(path: Path) -> list[str]:
    """Raises ``UserError``: the file is none that `imagine learn-experience` wrote."""
    entries = read_json(path).get("experiences")
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UserError(f'{path} has no list "experiences" of texts, as `imagine learn-experience` writes it')
    return entries


def _numbered(experiences: Sequence[str]) -> str:
    return "\n".join(f"{k}. {text}" for k, text in enumerate(experiences, start=1))
