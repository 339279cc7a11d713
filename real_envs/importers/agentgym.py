"""AgentGym's conversations: a list of ``from`` (human or gpt), ``value`` and, perhaps, ``loss``.

The first messages explain the world and are answered by an assent that carries ``loss: false``; the episode begins
after it. Without such flags everything up to the first message of the model is the start, with the record's ``system``.
``Thought: ... Action: ...`` is taken apart: the action is what the world answered to, the thought a note of the turn.
The JSON of a ``function_call``, as of LlamaFactory, is written as a call. The last message of the model has no answer:
it ends the episode with an empty observation.
"""

from __future__ import annotations

import re
from typing import Any

from real_envs.importers.drafts import Dialogue, EpisodeDraft, Format, Reading, outcome
from real_envs.importers.ends import ending_of
from real_envs.importers.messages import apart, decoded, read_message, system_text, written_call
from real_envs.importers.records import Sample
from real_envs.store.codec import FieldError

CONVERSATIONS = "conversations"
_MODEL, _CALL = ("gpt", "assistant", "agent", "model", "bot", "chatgpt"), ("function_call", "tool_call")
_WORLD = (*"human user system observation tool function tool_response function_response ipython".split(),)  # noqa: SIM905
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_KNOWN = ("item_id", "task_id", "reward", "success", CONVERSATIONS)


class AgentGymFormat(Format):
    name = "agentgym"
    about = "conversations of from, value and loss, as of AgentGym and ShareGPT"
    marks = (CONVERSATIONS, "from", "value")

    def recognises(self, sample: Sample) -> str:
        messages = decoded(sample.record.get(CONVERSATIONS)) if isinstance(sample.record, dict) else None
        first = messages[0] if isinstance(messages, list) and messages else None
        good = isinstance(first, dict) and "from" in first
        return "its records have 'conversations' with 'from' and 'value'" if good else ""

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        return conversation_draft(value, reading)


def conversation_draft(record: Any, reading: Reading) -> EpisodeDraft:
    """Raises ``FieldError`` where there is no conversation, or a message has no known speaker or no text."""
    messages = decoded(record.get(CONVERSATIONS)) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise FieldError(CONVERSATIONS, "is no list of messages, or an empty one")
    flagged = any(isinstance(message, dict) and message.get("loss") is True for message in messages)
    dialogue, called, assented, used = Dialogue(), False, False, set(_KNOWN)
    if reading.system and isinstance(record.get("system"), str):
        used.add("system")
        dialogue.answer(system_text(record["system"], "system"))
    for i, message in enumerate(messages):
        at = f"{CONVERSATIONS}[{i}]"
        speaker, value = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(value, str):
            raise FieldError(f"{at}.value", f"is {value!r:.60}, not text")
        speaker = speaker.lower() if isinstance(speaker, str) else speaker
        others = {key: kept for key, kept in message.items() if key not in ("from", "value")}
        others |= {"role": "assistant" if speaker in _MODEL else "tool", "content": value}
        parts = read_message(others, at)[1]
        if parts.unread:
            raise parts.unread
        if speaker in _CALL:
            thoughts, text, _ = apart(value)
            tagged = _TAGGED.findall(text)
            calls = tagged or decoded(text)
            calls = calls if isinstance(calls, list) else [calls] if calls != text else text.splitlines()
            beside = _TAGGED.sub("", text).strip() if tagged else ""
            dialogue.act("\n".join([beside, *(written_call(call, f"{at}.value") for call in calls)]).strip(), thoughts)
            called = True
        elif speaker in _MODEL:
            if flagged and not dialogue.turns and message.get("loss") is not True:
                if assented:
                    raise FieldError(f"{at}.loss", "is not true, but the model has assented before: only one may")
                assented = True  # to the instructions
                continue
            if dialogue.unanswered:
                raise FieldError(CONVERSATIONS, f"has no answer to action {len(dialogue.turns)}")
            thought, action = thought_and_action(parts.text)
            dialogue.act(action, [*parts.thoughts, *filter(None, (thought,))])
            called = False
        elif speaker in _WORLD:
            if speaker != "system" or dialogue.turns or reading.system:
                dialogue.answer(parts.text, parts.error)
        else:
            raise FieldError(f"{at}.from", f"is {speaker!r:.40}, not human or gpt")
        dialogue.left_out.update(parts.left_out)
    judged = record.get("reward") is not None or record.get("success") is not None
    stop, failure = ending_of(record)
    stop = dialogue.end(stop, called, judged)
    if not dialogue.turns:
        raise FieldError(CONVERSATIONS, "has no action of the model")
    task = record.get("task_id", record.get("item_id"))
    return EpisodeDraft.of_record(
        record,
        used,
        start="\n\n".join(dialogue.start),
        turns=dialogue.turns,
        task_id=None if task is None else str(task),
        stop=stop,
        failure=failure,
        left_out=dialogue.left_out,
        **{"success": record.get("success"), **outcome(record.get("reward"))},
    )


def thought_and_action(text: str) -> tuple[str, str]:
    """``Thought: I need eggs. Action: open fridge`` taken apart; a text without ``Action:`` is an action."""
    action = re.search(r"(?:^|\n)\s*(?:Action:\s*|(?=Final Answer:))", text)
    if not action:
        return "", text.strip()
    return re.sub(r"^\s*Thought:\s*", "", text[: action.start()]).strip(), text[action.end() :].strip()
