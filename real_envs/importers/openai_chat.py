"""Chats in the formats of OpenAI, Anthropic and their like: messages of system, user, assistant (with calls) and tool.

The assistant acts; users, tools and later system messages are its world. A tool call is written as a call,
``get_user({"id": "u1"})``, after the message that it came with; thoughts are a note of the turn (``messages``). What
stands before the first message of the assistant is the start, with a system prompt that stands beside the messages.
What a simulated user asked its own tools is in no observation. A last message that nobody answered has an empty
observation. Where nothing says why an episode ended (``ends``), a dialogue did that the user hung up, that earned a
reward, or whose last message is an answer; of others nobody knows.

A record is an object with ``messages`` (or ``traj``, ``conversation``, ...), with the two parts ``prompt`` and
``completion`` of a rollout (TRL, verifiers) or ``input`` and ``output`` of OpenAI's Responses, or the list of messages
itself, which may be the whole file. Lists may be JSON text. Beside them may stand ``task_id``, ``reward`` of the whole
episode, ``success``, ``agent`` or ``model``, and ``id``. Results of tau2-bench hold such records as ``simulations``.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from real_envs.importers.containers import contained, container_of, not_read, with_result
from real_envs.importers.dialects import is_message, is_session, spoken
from real_envs.importers.drafts import Dialogue, EpisodeDraft, Format, Reading, column, outcome
from real_envs.importers.ends import ending_of
from real_envs.importers.messages import (
    AGENT,
    SPEAKERS,
    SYSTEM,
    USERS,
    WORLD,
    Parts,
    calls_of,
    decoded,
    read_message,
    system_text,
)
from real_envs.importers.records import Record, Sample, json_records
from real_envs.importers.sessions import GEMINI_CLI, gemini_session, sessions, stream
from real_envs.store.codec import FieldError
from real_envs.trajectory import StopReason

_LESS_SURE = ("history", "contents", "events", "chat_messages", "loglines", "chat_history", "steps")
MESSAGES = ("messages", "traj", "conversation", "trajectory", "conversations", *_LESS_SURE)
_ROLLOUTS = (("prompt", "completion"), ("input", "output"), ("prompt", "response"), ("query", "response"))
_PROMPTS = ("system", "instructions", "system_prompt", "systemInstruction", "system_instruction")  # beside the messages
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_STOP = "###STOP###"  # how the simulated user of tau-bench hangs up
_TEMPLATE = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<tool_response>")  # between messages
_ANSWERED = re.compile(  # what a tool gave, between texts of the model
    r"<(information|interpreter|observation|(?:tool|function|execution|search|code)_(?:output|result|response)s?)>.*?</\1>",
    re.DOTALL,
)
# what an agent wrote, and what its program added below it, as CrewAI logs them
_OBSERVED = re.compile(r"(.*^Action Input:.*)^Observation:[^\S\n]*(.*)\Z", re.DOTALL | re.MULTILINE)
_TAGGED_CALL = re.compile(r"<tool_call>\s*[{<]")
_MASKS = ("loss_mask", "response_mask", "completion_mask", "env_mask", "tool_mask")  # 1 where the model wrote a token
_TEXTS = (*_ROLLOUTS, ("input_prompt", "output_response"))
_KNOWN = ("task_id", "reward", "success", "user_scenario")
# of chats; a list of another name may hold each call of a dialogue
_LISTS = ("episodes", "rollouts", "trajectories", "conversations", "results", "data", "samples", "records", "chats")
_ASKED = re.compile("prompt|input|quer|request|context|example|demo|shot")  # in names of what a model was only shown
_OTHER = {"assistant": "user", "user": "assistant"}
_OWN = (  # what only an episode of its own states
    *("id", "reward", "reward_info", "success", "resolved", "passed", "solved", "correct", "is_correct", "score"),
    *("stop_condition", "exit_status"),
)
_OF_TASKS = ("task_id", "instance_id", "example_id", "trajectory_id", "session_id", "thread_id")
_STATES = "earlier_states"  # of one dialogue, which ``latest_states`` has counted


class OpenaiChat(Format):
    name = "openai"
    about = "chat messages with tool calls (messages of role and content), of OpenAI, Anthropic, verifiers, tau2-bench"
    marks = (*MESSAGES, "prompt", "completion", "role", "content", "chosen", "rejected", "preferred_output")

    def recognises(self, sample: Sample) -> str:
        record = sample.record
        if isinstance(record, dict) and record.keys() >= GEMINI_CLI:
            return "it is a session of Gemini's CLI"
        if is_session(record) or is_message(record):
            return (
                "it is a session of Claude Code"
                if is_session(record)
                else "it is one list of messages, items or events"
            )
        outer = record
        record = next(_opened(iter([Record("", record)]))).value
        inside = "" if record is outer else f" in a list of its field '{_list_of_chats(outer)}'"
        key, messages = messages_of(record)
        if not_read(record) or not (container_of(record) or _begins(messages)):
            return ""
        kind = (
            "messages with 'role'"
            if messages and isinstance(messages[0], dict) and "role" in messages[0]
            else "messages"
        )
        return f"its records have {container_of(record) or kind}{f' in {key!r}' if key else ''}{inside}"

    def records(self, path: Path) -> Iterator[Record]:
        records = json_records(path)
        first = next(records, None)
        records = chain(() if first is None else (first,), records)
        if first is not None and _update(first.value):
            lines = list(records)
            updates = [_update(line.value) for line in lines]
            whole = all(updates) and any(_role_of(update[0]) == WORLD for update in updates)
            dialogue = Record("the file", {"messages": [message for update in updates for message in update]})
            yield from (dialogue,) if whole else contained(latest_states(iter(lines)))
        elif first is not None and is_message(first.value) and not is_session(first.value):
            lines = list(records)
            if isinstance(lines[-1].value, FieldError):  # the log broke off there
                yield lines.pop()
            wrong = next((line for line in lines if isinstance(line.value, FieldError)), None)
            command = "ls FOLDER/*.json | sort -V | xargs jq -c . > events.jsonl"
            alone = f"is one event of a dialogue: `{command}` makes one file of them"
            if wrong or len(lines) == 1:
                hole = wrong and f"is one dialogue, of which {wrong.where} {wrong.value.reason}"
                yield Record("the file", FieldError("", hole or alone))
            else:
                yield Record("the file", stream([line.value for line in lines]))
        elif first is not None and isinstance(first.value, dict) and first.value.keys() >= GEMINI_CLI:
            yield from gemini_session(records) if "messages" not in first.value else contained(records)
        else:
            session = first is not None and is_session(first.value)
            yield from sessions(records) if session else contained(latest_states(_opened(with_result(records, path))))

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        return chat_draft(value, reading)


def _update(value: Any) -> list[Any]:
    """What a node of LangGraph added to the messages, ``{"agent": {"messages": [...]}}``, if no user wrote it."""
    inner = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else None
    messages = inner.get("messages") if isinstance(inner, dict) else None
    new = isinstance(messages, list) and _begins(messages) and _role_of(messages[0]) is not None
    return messages if new and isinstance(messages, list) else []


def _role_of(message: Any) -> str | None:
    """Who speaks, if that is the agent or one of its tools."""
    role = str(_role(next(iter(spoken(message)[0]), None))).lower()
    return SPEAKERS.get(role) if role not in USERS and SPEAKERS.get(role) != SYSTEM else None


def _list_of_chats(value: Any) -> str:
    """The one field with a list of records that hold chats; "" where the record is none of such a list's."""
    named = isinstance(value, dict) and any(key in value for key in _LISTS)
    if not named or container_of(value) or messages_of(value)[0]:
        return ""
    first = {key: value[key][0] for key in _LISTS if isinstance(value.get(key), list) and value[key]}
    lists = [key for key, one in first.items() if isinstance(one, dict) and (container_of(one) or messages_of(one)[0])]
    return lists[0] if len(lists) == 1 else ""


def _opened(records: Iterator[Record]) -> Iterator[Record]:
    """The records in a list such as ``{"episodes": [...]}``; all others as they are."""
    for record in records:
        if key := _list_of_chats(record.value):
            about = {name: record.value[name] for name in ("agent", "model") if name in record.value}
            for i, inner in enumerate(record.value[key]):
                chat = {**about, **inner} if isinstance(inner, dict) else inner
                yield Record(f"{record.where}, {key}[{i}]", chat)
        else:
            yield record


def latest_states(records: Iterable[Record]) -> Iterator[Record]:
    """The records; of those in a row that hold one dialogue as it grew, in either order, only the longest.

    So LangGraph writes the states of a thread, and others a line a call. One that states an id, a reward or a success
    is an episode of its own, and so is one that says the same as the record before.
    """
    kept, held, states = list[Record](), list[Any](), 0  # the longest so far, and how many it stands for besides
    of_task: list[Any] = []
    try:
        for record in records:
            fields = record.value if isinstance(record.value, dict) else {}
            own = any(fields.get(key) not in (None, "") for key in _OWN) or bool(container_of(fields))
            own |= "completion" in fields and bool(fields.get("error"))  # beside messages it may be that of one call
            task = list(map(fields.get, _OF_TASKS))
            listed = [] if own or isinstance(record.value, FieldError) else messages_of(record.value)[1]
            short, long = sorted((held, listed), key=len)
            alike = bool(short) and task == of_task and short == long[: len(short)]
            if alike and (len(short) < len(long) or states):
                states += 1
                if listed is long:
                    kept, held = [record], listed
            else:
                yield from (_with_states(each, states) for each in kept)
                kept, held, states, of_task = [record], listed, 0, task
    except (OSError, EOFError, zlib.error):  # the file breaks off
        yield from (_with_states(each, states) for each in kept)
        raise
    yield from (_with_states(each, states) for each in kept)


def _with_states(record: Record, states: int) -> Record:
    fields = record.value if isinstance(record.value, dict) else {"messages": record.value}
    return Record(record.where, {**fields, _STATES: states}, record.whole) if states else record


def _begins(messages: list[Any]) -> bool:
    """With a message. Older logs of OpenHands hold pairs of an action and its answer."""
    first = messages[0] if messages else None
    return is_message(decoded(first[0] if isinstance(first, list) and first else first))


def messages_of(record: Any) -> tuple[str, list[Any]]:
    """The name of the field that holds the messages, and these; an empty list where there are none.

    It may have any name, or stand in an object, if it is the only one.
    """
    if isinstance(record, list):
        return "", record
    if not isinstance(record, dict):
        return "", []
    lists = ((key, decoded(record.get(key))) for key in MESSAGES)
    sure = (
        (key, given) for key, given in lists if isinstance(given, list) and (key not in _LESS_SURE or _begins(given))
    )
    named = next(sure, ("", []))
    reply = decoded(record.get("response")) if named[0] == "messages" else None
    is_reply = isinstance(reply, dict) and reply.get("role") == "assistant"  # of logs with a line a call
    if is_reply and not _is_last(reply, named[1]):
        return "messages+response", [*named[1], reply]
    for first, second in _ROLLOUTS:
        before, after = decoded(record.get(first)), decoded(record.get(second))
        answers = second == "completion" or (second == "response" and isinstance(before, list))
        if answers and isinstance(after, str) and not (named[0] and isinstance(before, str)):
            after = [{"role": "assistant", "content": after}]
        if second == "completion" and second in record and after is None and not named[1]:  # broke before it acted
            after = []
        if isinstance(before, str | list) and isinstance(after, list) and (first != "input" or _items(after)):
            before = [{"role": "user", "content": before}] if isinstance(before, str) else before
            return f"{first}+{second}", [*before, *after]
    dialogues = {} if named[0] else _dialogues(record)
    wholes = [one for key, one in dialogues.items() if not _ASKED.search(key)]
    begun = [key for key, one in dialogues.items() if _ASKED.search(key) and any(one == o[: len(one)] for o in wholes)]
    dialogues = {key: one for key, one in dialogues.items() if key not in begun}  # inputs, and the same with outputs
    only = len(dialogues) == 1 and not any(map(_ASKED.search, dialogues))
    return next(iter(dialogues.items())) if only else named


def _is_last(reply: Any, messages: list[Any]) -> bool:
    """Whether the last message is the reply, perhaps in another form."""
    last = decoded(messages[-1]) if messages else None
    if _role(last) != "assistant":
        return False
    with suppress(FieldError):
        return read_message(last, "")[1].text == read_message(reply, "")[1].text
    return bool(last == reply)


def _dialogues(record: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists of messages under any name, and in objects (``output.history``)."""
    dialogues = {}
    for key, given in record.items():
        for name, inner in given.items() if isinstance(given, dict) else ((None, given),):
            listed = decoded(inner)
            if isinstance(listed, list) and _begins(listed):
                dialogues[key if name is None else f"{key}.{name}"] = listed
    return dialogues


def _items(values: list[Any]) -> bool:
    return bool(values) and all(is_message(value) for value in values)


def chat_draft(record: Any, reading: Reading) -> EpisodeDraft:
    """Raises ``FieldError`` where there are no messages, or one has no known role or holds what cannot be read."""
    if about := not_read(record):
        raise FieldError("", f"is one of {about}")
    key, messages = messages_of(record)
    if not messages and len(several := _dialogues(record) if isinstance(record, dict) else {}) > 1:
        raise FieldError(", ".join(several), "are several dialogues: keep the one that was played, as 'messages'")
    if not messages:
        raise FieldError(MESSAGES[0], "is no list of messages, or an empty one")
    fields = record if isinstance(record, dict) else {}
    if "." in key and key not in fields:
        outer = key.partition(".")[0]
        fields = {**fields[outer], **{name: kept for name, kept in fields.items() if name != outer}}
    after = key.partition("+")[2]
    if after and isinstance(text := fields[after], str) and (_TEMPLATE.search(text) or _is_of_several(fields, text)):
        raise FieldError(after, "is one text of the agent and its world, as of a chat template: log messages")
    dialogue, last, message, used = Dialogue(), Parts(), None, {*_KNOWN, _STATES}
    states = fields.get(_STATES)
    dialogue.left_out["earlier state of the dialogue"] += states if isinstance(states, int) else 0
    if reading.system and (beside := [key for key in _PROMPTS if isinstance(fields.get(key), str | list | dict)]):
        used.add(beside[0])
        dialogue.answer(system_text(fields[beside[0]], beside[0]))
    names, prompts = set[str](), set[str]()  # of agents, and what system messages said before the first action
    # AutoGen 0.2 logs a dialogue as its user's side holds it, who is its assistant
    first = messages[0] if isinstance(messages[0], dict) else {}
    named = all(isinstance(one, dict) and ("name" in one or str(one.get("role")) not in _OTHER) for one in messages)
    swapped = named and first.get("role") == "assistant" and "user" in str(first.get("name")).lower()
    of_user = False  # whether the user's own tools answer next
    made, answered, early = Counter[str](), Counter[str](), dict[str, str]()  # calls by id, and where answers are first
    for at, value in _each(key, messages, dialogue):
        role = value.get("role") if isinstance(value, dict) else None
        if swapped and str(role) in _OTHER and not calls_of(value, at):
            role = _OTHER[str(role)]
            value = value | {"role": role}
        if role == "exit":  # how mini-swe-agent notes its end
            dialogue.left_out["exit message"] += 1
            continue
        if role == "tool" and value.get("requestor", "user" if of_user else "assistant") == "user":
            dialogue.left_out["answer to the user's own tool"] += 1
            continue
        speaker, parts = read_message(value, at)
        if parts.left_out:
            dialogue.left_out.update(parts.left_out)
        own_calls = calls_of(value, at) if role == "user" else []
        for call in filter(None, parts.answered.values()):
            answered[call] += 1
            if call not in made:
                early.setdefault(call, at)
        if speaker == AGENT:
            names |= {str(value["name"])} if value.get("name") and "role" in value else set()
            for call in parts.calls:
                made[call] += 1
            dialogue.act(parts.text, parts.thoughts, parts.calls, parts.within)
            last, message = parts, value
        elif speaker == SYSTEM and parts.text in prompts:  # with each request, as of Pydantic AI
            dialogue.left_out["repeated system prompt"] += 1
        elif speaker != SYSTEM or dialogue.turns or reading.system:
            prompts |= {parts.text} if speaker == SYSTEM and not dialogue.turns else set()
            dialogue.left_out["call of the user's own tool"] += len(own_calls)
            if not own_calls or parts.text:
                dialogue.answer(parts.text, parts.error, parts.answer_parts)
            dialogue.unread = dialogue.unread or parts.unread
        earned = value.get("reward")
        if earned is not None and (isinstance(earned, bool) or not isinstance(earned, int | float)):
            raise FieldError(f"{at}.reward", f"is {earned!r:.40}, not a number")
        if earned is not None and dialogue.turns and speaker != SYSTEM:
            turn = dialogue.turns[-1]
            turn["reward"] = turn.get("reward", 0.0) + earned
        of_user = bool(own_calls)
    for call in (call for call in early if made[call] >= answered[call]):  # else one was cut off before
        raise FieldError(early[call], f"answers the call '{call}', which is made only later")
    dialogue.left_out["name of another agent"] += max(0, len(names) - 1)
    reward = _reward(fields)
    whole = record if isinstance(record, dict) else {}
    judged = [column(whole, reading.mapping[label]) for label in ("success", "reward") if label in reading.mapping]
    judged += [reward, fields.get("success")]
    if reward is not None:
        dialogue.left_out["reward of a message"] += sum(turn.pop("reward", None) is not None for turn in dialogue.turns)
    stop, failure = ending_of(fields, message)
    if stop is None and last.unfinished and dialogue.unanswered:
        stop = StopReason.CONTEXT_LIMIT
    stop = dialogue.end(
        stop,
        bool(last.calls) or bool(_TAGGED_CALL.search(last.text)),
        judged=any(one not in (None, "") for one in judged) or (message or {}).get("ends") is True,
    )
    turns = dialogue.turns
    if not turns:
        raise FieldError(key, "has no message of the assistant that says or calls anything")
    if stop is None and (_STOP in turns[-1]["observation"] or reward or (message or {}).get("ends") is True):
        stop = StopReason.TERMINATED
    return EpisodeDraft.of_record(
        fields,
        (*key.split("+"), key.rpartition(".")[2], *used),
        start="\n\n".join(filter(None, dialogue.start)),
        turns=turns,
        task_id=None if fields.get("task_id") is None else str(fields["task_id"]),
        stop=stop,
        failure=failure,
        left_out=dialogue.left_out,
        world_facts=_scenario(fields) or None,
        **{"success": fields.get("success"), **outcome(reward)},
    )


def _each(key: str, messages: list[Any], dialogue: Dialogue) -> Iterator[tuple[str, Any]]:
    """Where each message stands, and the message in plain terms."""
    for i, value in enumerate(map(decoded, messages)):
        for part in value if isinstance(value, list) else (value,):
            plain, left_out = spoken(part)
            dialogue.left_out.update(left_out)
            alone = i + 1 == len(messages) or _role(messages[i + 1]) == "assistant"
            for message in plain:
                both = _OBSERVED.match(str(message.get("content"))) if alone and _role(message) == "assistant" else None
                several = both and len(re.findall("^Action Input:", both[1], re.MULTILINE)) > 1
                if several or (both and re.search("^(?:Thought|Action|Final Answer):", both[2], re.MULTILINE)):
                    raise FieldError(f"{key}[{i}]", "is a text of several actions and observations: log messages")
                if both:
                    yield f"{key}[{i}]", {**message, "content": both[1].strip()}
                    message = {"role": "tool", "content": both[2].strip()}
                yield f"{key}[{i}]", message


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def unread_texts(record: Mapping[str, Any]) -> str:
    """Why a record of a prompt and its answer as two texts, or of a chat template, is not read; "" for all others."""
    texts = {key: text for key, text in record.items() if isinstance(text, str)}
    if name := next((key for key, text in texts.items() if _TEMPLATE.search(text)), ""):
        return f"holds the text of a chat template in '{name}', where nobody can tell who wrote what: log messages"
    prompt, answer = next((pair for pair in _TEXTS if pair[0] in record and pair[1] in texts), ("", ""))
    if answer and _is_of_several(record, texts[answer]):
        return f"holds texts of the agent and its world in '{answer}', and nobody can tell who wrote what: log messages"
    rename = "where it is one message, name them 'prompt' and 'completion', else log messages"
    return f"holds a prompt and what followed as a text, '{prompt}' and '{answer}': {rename}" if answer else ""


def _is_of_several(record: Mapping[str, Any], text: str) -> bool:
    """Whether a text has parts that the model did not write: tokens before its last one that a mask leaves out."""
    masks = (list(map(bool, record[key])) for key in _MASKS if isinstance(record.get(key), list))
    others = any(False in mask[mask.index(True) : -mask[::-1].index(True) or None] for mask in masks if True in mask)
    return others or bool(_ANSWERED.search(text))


def _scenario(fields: Mapping[str, Any]) -> list[str]:
    """What a simulated user was told, a sentence each: ``info.task.instruction`` of tau-bench, ``user_scenario`` of a
    task of tau2-bench."""
    scenario: Any = fields.get("user_scenario")
    for key in ("info", "task", "instruction") if scenario is None else ():
        scenario = (scenario or fields).get(key) if isinstance(scenario or fields, Mapping) else None
    texts, sentences = [scenario], list[str]()
    while texts:
        text = texts.pop(0)
        if isinstance(text, Mapping):
            texts[:0] = text.values()
        elif isinstance(text, str):
            sentences += [part.strip() for part in _SENTENCE.split(text) if part.strip()]
    return sentences


def _reward(fields: Mapping[str, Any]) -> Any:
    """``reward``, or that of ``reward_info`` (tau2-bench)."""
    info = fields.get("reward_info")
    return info.get("reward") if fields.get("reward") is None and isinstance(info, dict) else fields.get("reward")
