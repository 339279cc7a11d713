"""AgentGym's conversations: a list of ``from`` (human or gpt), ``value`` and, perhaps, ``loss``.

The first messages explain the world and are answered by an assent that carries ``loss: false``; the episode begins
after it. Without such flags everything up to the first message of the model is the start. ``Thought: ... Action: ...``
is taken apart: the action is what the world answered to, the thought a note of the turn. The last message of the model
has no answer: it ends the episode with an empty observation.
"""

from __future__ import annotations

import re
from typing import Any

from real_envs.importers.drafts import LOG, Dialogue, EpisodeDraft, Format, Reading, outcome
from real_envs.importers.records import Sample
from real_envs.store.codec import FieldError

CONVERSATIONS = "conversations"
_MODEL, _WORLD = ("gpt", "assistant", "agent"), ("human", "user", "system", "observation", "tool")
_KNOWN = ("item_id", "task_id", "reward", "success", CONVERSATIONS)


class AgentGymFormat(Format):
    name = "agentgym"
    about = "conversations of from, value and loss, as of AgentGym and ShareGPT"

    def recognises(self, sample: Sample) -> str:
        messages = sample.record.get(CONVERSATIONS) if isinstance(sample.record, dict) else None
        first = messages[0] if isinstance(messages, list) and messages else None
        good = isinstance(first, dict) and "from" in first
        return "its records have 'conversations' with 'from' and 'value'" if good else ""

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        return conversation_draft(value)


def conversation_draft(record: Any) -> EpisodeDraft:
    """Raises ``FieldError`` where there is no conversation, or a message has no known speaker or no text."""
    messages = record.get(CONVERSATIONS) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise FieldError(CONVERSATIONS, "is no list of messages, or an empty one")
    flagged = any(isinstance(message, dict) and message.get("loss") is True for message in messages)
    dialogue = Dialogue()
    for i, message in enumerate(messages):
        at = f"{CONVERSATIONS}[{i}]"
        speaker, value = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(value, str):
            raise FieldError(f"{at}.value", f"is {value!r:.60}, not text")
        if speaker in _MODEL:
            if flagged and not dialogue.turns and message.get("loss") is not True:
                continue  # the assent to the instructions
            thought, action = thought_and_action(value)
            dialogue.act(action)
            if thought:
                dialogue.turns[-1]["info"] = {f"{LOG}thought": thought}
        elif speaker in _WORLD:
            dialogue.answer(value)
        else:
            raise FieldError(f"{at}.from", f"is {speaker!r:.40}, not human or gpt")
    unanswered = next((k for k, turn in enumerate(dialogue.turns[:-1]) if turn["observation"] is None), None)
    if unanswered is not None:
        raise FieldError(CONVERSATIONS, f"has no answer to action {unanswered + 1}")
    if not dialogue.turns:
        raise FieldError(CONVERSATIONS, "has no action of the model")
    dialogue.end()
    task = record.get("task_id", record.get("item_id"))
    return EpisodeDraft.of_record(
        record,
        _KNOWN,
        start="\n\n".join(dialogue.start),
        turns=dialogue.turns,
        task_id=None if task is None else str(task),
        **{"success": record.get("success"), **outcome(record.get("reward"))},
    )


def thought_and_action(text: str) -> tuple[str, str]:
    """``Thought: I need eggs. Action: open fridge`` taken apart; a text without ``Action:`` is an action."""
    action = re.search(r"(?:^|\n)\s*Action:\s*", text)
    if not action:
        return "", text.strip()
    return re.sub(r"^\s*Thought:\s*", "", text[: action.start()]).strip(), text[action.end() :].strip()
