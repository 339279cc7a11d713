"""What one message of a chat holds: texts, thoughts, calls and answers, as OpenAI, Anthropic and their like write them.

Every part is read, or left out and counted by its kind, or it refuses the message. Thoughts, whether ``<think>`` in the
text, a part or a field of their own, stand apart from the action. A call is written ``get_user({"id": "u1"})``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from real_envs.store.codec import FieldError

AGENT, WORLD, SYSTEM = "agent", "world", "system"
_NAMES = {
    AGENT: "assistant model ai gpt chatbot chatgpt bot agent aimessage aimessagechunk tool-call",
    WORLD: "user tool function human humanmessage toolmessage tool_result toolresult tool-response tool_response "
    "observation function_response function_call_output ipython environment env",
    SYSTEM: "system developer systemmessage",
}
SPEAKERS = {name: speaker for speaker, names in _NAMES.items() for name in names.split()}
USERS = ("user", "human", "humanmessage")  # of the world, those that answer no call
ITEMS = {  # of OpenAI's Responses API, which have a type in place of a role
    **dict.fromkeys(("reasoning", "function_call", "custom_tool_call"), AGENT),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), WORLD),
}
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_CALLS = ("tool_use", "tool-use", "tool_call", "tool-call", "toolUse", "function_call", "custom_tool_call")
_ANSWERS = (
    *("tool_result", "tool-result", "toolResult", "function_result"),
    *("function_call_output", "custom_tool_call_output"),
)
_THOUGHTS = ("thinking", "reasoning", "reasoningContent", "text_reasoning")
_BEDROCK = ("text", "toolUse", "toolResult", "reasoningContent")  # keys that stand in place of a type
_ALONE = ("json", "image", "audio", "video", "document", "file", "guardContent", "citationsContent", "cachePoint")
_NO_TEXT = frozenset(
    "image image_url input_image audio input_audio output_audio video video_url file input_file document "  # noqa: SIM905
    "computer_screenshot".split()
)
_SECRET = frozenset(("redacted_thinking",))  # thoughts that nobody can read
_IN_PLACE = frozenset(
    "tool_calls function_call refusal reasoning_content reasoning reasoning_details thinking thought thoughts".split()  # noqa: SIM905
)
_REASONS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "reasoning_text")
_PLAIN = frozenset(("role", "content", "name", "id", "tool_call_id"))
_ABOUT = (
    "usage usage_metadata response_metadata provider_specific_fields metadata providerMetadata logprobs tokens cost"
)
_ABOUT += " tool_call_ids cache_control extra extras info timing raw_data token_ids thinking_blocks error meta _meta"
_NO_PARTS = frozenset(
    (*_ABOUT.split(), "generation_logprobs")
)  # fields with lists and objects that are no part of what was said
_IDS = ("call_id", "tool_call_id", "tool_use_id", "toolUseId", "toolCallId", "id")  # of calls
_REDACTED = "redacted-by-litellm"  # what LiteLLM writes in place of a text
_BESIDE = tuple("image images audio video videos files attachments".split())  # fields that hold no text  # noqa: SIM905
_MARKS = {  # around thoughts, of templates
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "seed:think")},
    **{"[THINK]": "[/THINK]", "◁think▷": "◁/think▷", "<|START_THINKING|>": "<|END_THINKING|>"},
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
_FIRST = {  # only where a text begins so
    f"<{name}>": f"</{name}>"
    for name in ("thought", "reasoning", "analysis", "scratchpad", "reflection", "antthinking")
}
_IN_MARKS = ("think", "thought", "reasoning", "analysis", "scratchpad", "reflection")  # each mark has one of these
_HARMONY = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)", re.DOTALL)
_CALL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>\w+ to=(?:functions\.)?([\w.-]+).*?<\|message\|>(.*?)(?:<\|call\|>|\Z)",
    re.DOTALL,
)
_FINAL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")


def _around(marks: Mapping[str, str], begin: str = "") -> list[str]:
    return [f"{begin}{re.escape(first)}(.*?){re.escape(last)}" for first, last in marks.items()]


_THOUGHT = re.compile("|".join((*_around(_MARKS), *_around(_FIRST, r"\A\s*"), _HARMONY.pattern)), re.DOTALL | re.I)
# how a text begins with a thought
THINKS = re.compile(rf"\s*({'|'.join(map(re.escape, (*_MARKS, *_FIRST)))}|<\|channel\|>analysis)", re.I)
_FIRSTS, _LASTS = ("|".join(map(re.escape, marks)) for marks in (_MARKS, _MARKS.values()))
# a mark without the other stands at the beginning, the edge of a line, or between two sentences: texts speak of marks
_OPENED = re.compile(rf"\A\s*(?:{_FIRSTS})|^[^\S\n]*(?:{_FIRSTS})[^\S\n]*$", re.I | re.MULTILINE)
_CLOSED = re.compile(
    rf"(?:{_LASTS})(?=[^\S\n]*$)|^[^\S\n]*(?:{_LASTS})|(?<=[\w.!?)])(?:{_LASTS})(?=\w)", re.I | re.MULTILINE
)
# names of fields that say something about a message, and of those that may hold what an agent did
_NAMES_OF = re.compile(
    r"(id|at|ts|time|stamp|date|created|reason|model|status|type|role|name|source|version|from)$", re.I
)
_ACTS = re.compile("call|action|command|function", re.I)
_ENDS = re.compile(  # of a message in a template
    r"(?:\s*(?:<\|(?:im_end|endoftext|eot_id|eom_id|end|return|END_OF_TURN_TOKEN)\|>|<end_of_turn>|(?<=[^\s>])</s>))+\s*\Z"
)
_BEGINS = re.compile(
    r"\A\s*(?:<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n+|<start_of_turn>model\n)"
)


@dataclass(slots=True)
class Parts:
    """What a message says.

    Attributes:
        calls: the ids of its calls; "" where one is unknown.
        within: answers that stand within its calls, with the ids of these.
        answered: the ids of the calls that its texts answer, by the numbers of these.
        unfinished: it breaks off within a thought.
        error: it says of itself that it is the answer of a tool that failed.
        unread: why it cannot stand alone, such as a picture without text.
        left_out: parts that are no text, by their kind.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    within: list[tuple[str, str]] = field(default_factory=list)
    answered: dict[int, str] = field(default_factory=dict)
    unfinished: bool = False
    error: bool = False
    unread: FieldError | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def text(self) -> str:
        return "\n".join(text for text in self.texts if text)

    @property
    def answer_parts(self) -> list[tuple[str, str | None]]:
        """Its texts, each with the id of the call that it answers."""
        return [(text, self.answered.get(i)) for i, text in enumerate(self.texts)]

    def answers(self, begin: int, call: str) -> None:
        """The texts from the one of number ``begin`` on are the answer to a call."""
        self.texts[begin:] = ["\n".join(filter(None, self.texts[begin:]))]
        self.answered[begin] = call

    def add(self, text: str, acts: bool) -> None:
        """Text that somebody said; thoughts in it are apart if it is the agent."""
        if text == _REDACTED:
            self.left_out["redacted text"] += 1
            return
        if acts and text[-9:].rstrip().endswith(">") and (end := _ENDS.search(text)) and "<s>" not in text:
            text = _BEGINS.sub("", text[: end.start()], count=1)
            self.left_out["mark at the end of a message"] += 1
        thoughts, rest, unfinished = apart(text) if acts else ([], text, False)
        self.texts.append(rest)
        self.thoughts += [thought for thought in thoughts if thought not in self.thoughts]
        self.unfinished = unfinished


def read_message(message: Any, at: str) -> tuple[str, Parts]:
    """Who speaks (``AGENT``, ``WORLD`` or ``SYSTEM``), and what. Raises ``FieldError`` for what cannot be read."""
    if not isinstance(message, dict):
        raise FieldError(at, f"is {message!r:.60}, not a message")
    role, kind, parts = message.get("role"), message.get("type"), Parts()
    if role is None and isinstance(kind, str) and kind in ITEMS:
        _add(message, at, parts, ITEMS[kind] == AGENT)
        return ITEMS[kind], parts
    if not isinstance(role, str) or role.lower() not in SPEAKERS:
        unknown = role is None and kind is not None
        reason = f"is {(kind if unknown else role)!r:.40}, not system, user, assistant or tool"
        raise FieldError(f"{at}.{'type' if unknown else 'role'}", reason)
    speaker, content = SPEAKERS[role.lower()], message.get("content")
    acts = speaker == AGENT
    if isinstance(content, str) and message.keys() <= _PLAIN and content != _REDACTED:  # most messages
        parts.add(content, acts)
        if speaker == WORLD and role.lower() not in USERS:
            parts.answered[0] = _id_of(message)
        return speaker, parts
    if acts:
        thought = next((message[key] for key in _REASONS if message.get(key)), "")
        if isinstance(thought, str) and thought.strip():
            parts.thoughts.append(thought.strip())
        elif details := message.get("reasoning_details") or message.get("thinking_blocks") or thought:
            parts.thoughts += _plain_thoughts(details, f"{at}.reasoning_details", parts)
    if "content" not in message and not any(message.get(key) for key in _IN_PLACE):
        others = [value for key, value in message.items() if key not in _NO_PARTS and not _NAMES_OF.search(key)]
        if any(value and isinstance(value, str | list | dict) for value in others):
            raise FieldError(f"{at}.content", f"is missing: there are {', '.join(map(str, message))}")
    if speaker == WORLD and role != "user":  # tools may return anything
        plain = content is None or (isinstance(content, list) and all(isinstance(p, str | dict) for p in content))
        content = _answer({"content": content if plain or isinstance(content, str | dict) else json.dumps(content)})
    _add_content(content, f"{at}.content", parts, acts)
    if acts:
        if isinstance(audio := message.get("audio"), dict) and isinstance(audio.get("transcript"), str):
            parts.add(audio["transcript"], acts)
        if isinstance(message.get("refusal"), str):
            parts.texts.append(message["refusal"])
        for call, where in calls_of(message, at):
            parts.texts.append(written_call(call, where))
            parts.calls.append(_id_of(call))
            if (text := _answer_within(call)) is not None:
                parts.within.append((text, _id_of(call)))
            parts.left_out["unparsed arguments"] += isinstance(call, dict) and bool(call.get("parse_error"))
    elif speaker == WORLD and (error := message.get("error")):
        parts.error = True
        text = error.get("message") if isinstance(error, dict) else error
        if isinstance(text, str) and text not in parts.text:
            parts.add(text, False)
    if speaker == WORLD and role.lower() not in USERS and not parts.answered:
        parts.answers(0, _id_of(message))
    failed = message.get("is_error") is True or message.get("isError") is True or message.get("status") == "error"
    parts.error |= speaker == WORLD and failed
    for key, value in message.items():
        holds_text = isinstance(value, list | dict) or (isinstance(value, str) and value.count(" ") > 1)
        if key in _BESIDE or (holds_text and key not in _PLAIN and key not in _IN_PLACE and key not in _REASONS):
            parts.left_out[key if key in _BESIDE else f"field {key}"] += bool(value) and key not in _NO_PARTS
    parts.left_out += Counter()  # without counts of 0
    unread = [
        kind
        for kind in parts.left_out
        if kind not in _SECRET and (not kind.startswith("field ") or (acts and _ACTS.search(kind)))
    ]
    if unread and not parts.text and not parts.thoughts:
        parts.unread = FieldError(f"{at}.content", f"holds {', '.join(unread)} and no text: nothing of it can be read")
        if acts:
            raise parts.unread
    return speaker, parts


def system_text(value: Any, at: str) -> str:
    """A system prompt that stands beside the messages: text, or parts."""
    parts = Parts()
    _add_content(value.get("parts") if isinstance(value, dict) else value, at, parts, False)
    return parts.text


def decoded(value: Any) -> Any:
    """An object or list that was stored as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return decoded(inner) if isinstance(inner, str) else inner
    return value


def calls_of(message: Mapping[str, Any], at: str) -> list[tuple[Any, str]]:
    """The calls of a message, and where each one stands: those of today, and the one of 2023."""
    calls = decoded(message.get("tool_calls")) or []
    calls = [calls] if isinstance(calls, dict) and "name" in calls else calls
    if not isinstance(calls, list):
        raise FieldError(f"{at}.tool_calls", f"is {calls!r:.60}, not a list")
    listed = [(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    old = message.get("function_call")
    again = any(isinstance(call, dict) and call.get("function", call) == old for call in calls)
    return [*listed, *([(old, f"{at}.function_call")] if old and not again else [])]


def _answer_within(call: Any) -> str | None:
    """What a call was answered, of logs that note it within the call."""
    for held in (call, call.get("function")) if isinstance(call, dict) else ():
        for given in (held.get("output"), held.get("result")) if isinstance(held, dict) else ():
            if given is not None:
                return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return None


def written_call(call: Any, at: str) -> str:
    """A call in one spelling: ``{"function": {"name", "arguments"}}``, the same without nesting, or JSON text of it.

    Raises:
        FieldError: no function is named.
    """
    inner = decoded(call)
    for key in ("function", "custom"):
        if isinstance(inner, dict) and isinstance(within := decoded(inner.get(key)), dict):
            inner = within
    if not isinstance(inner, dict):
        raise FieldError(at, f"is {inner!r:.60}, not a call")
    # Inspect writes the name itself as the function
    names = ("name", "toolName", "tool_name", "function")
    name = next((inner[key] for key in names if isinstance(inner.get(key), str)), "")
    if not name:
        raise FieldError(at, "names no function")
    keys = ("arguments", "input", "args", "parameters", "tool_kwargs")
    given = (inner[key] for key in keys if inner.get(key) is not None)
    return f"{name}({_arguments(next(given, None))})"


def apart(text: str) -> tuple[list[str], str, bool]:
    """The thoughts in a text, the text without them, and whether it breaks off within one.

    A chat template may have written the first ``<think>``, so that the text has only its end.
    """
    if "<" not in text and "[" not in text and "◁" not in text:
        return [], text, False
    folded = text.lower()
    if not any(word in folded for word in _IN_MARKS):
        return [], text, False
    thoughts = [match[match.lastindex or 0] for match in _THOUGHT.finditer(text)]
    called = _CALL.sub(lambda match: f"{match[1]}({_arguments(match[2])})", _THOUGHT.sub("", text))
    action, unfinished = _FINAL.sub("", called), False
    if closed := _CLOSED.search(action):
        thoughts, action = [*thoughts, action[: closed.start()]], action[closed.end() :]
    if opened := _OPENED.search(action):
        thoughts, action, unfinished = [*thoughts, action[opened.end() :]], action[: opened.start()], True
    if not (thoughts or closed or unfinished):
        return [], text, False
    return [thought.strip() for thought in thoughts if thought.strip()], action.strip(), unfinished


def _arguments(value: Any) -> str:
    """JSON in one spelling, however the model spaced it; anything else as it is."""
    inner = decoded(value)
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError):
            return inner
    return "" if inner is None else json.dumps(inner, ensure_ascii=False)


def _id_of(part: Any) -> str:
    """The id of a call, or of the call that an answer is to; "" where it is unknown."""
    for key in _IDS if isinstance(part, dict) else ():
        if isinstance(name := part.get(key), str) and name:
            return name
    return ""


def _kind(part: Mapping[str, Any]) -> Any:
    kind = part.get("type")
    named = (key for key in (*_BEDROCK, *_ALONE) if part.get(key) is not None and (key in _BEDROCK or len(part) == 1))
    return next(named, None) if kind is None else kind


def _add_content(content: Any, at: str, parts: Parts, acts: bool) -> None:
    if content is None:
        return
    if isinstance(content, str):
        parts.add(content, acts)
        return
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        if isinstance(part, str):
            parts.add(part, acts)
        elif isinstance(part, dict):
            _add(part, f"{at}[{i}]" if isinstance(content, list) else at, parts, acts)
        elif part is not None:
            raise FieldError(at, f"is {content!r:.60}, not text")


def _add(part: Mapping[str, Any], at: str, parts: Parts, acts: bool) -> None:
    """Adds what a part of a content, or an item, holds; ``acts``: of the agent."""
    kind = _kind(part)
    inner = part[kind] if part.get("type") is None and kind != "text" and isinstance(part.get(kind), dict) else part
    if kind in _TEXTS or kind == "refusal":
        text = inner.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, dict) and isinstance(text.get("value"), str):  # of OpenAI's Assistants
            inner, text = text, text["value"]
        if not isinstance(text, str):
            raise FieldError(f"{at}.text", f"is {text!r:.60}, not text")
        parts.add(text, acts)
        cited = inner.get("citations") or inner.get("annotations")
        if isinstance(cited, list) and cited:
            parts.left_out["citation"] += len(cited)
    elif kind in _THOUGHTS and acts:
        parts.thoughts += _thoughts(inner, at, parts)
    elif kind in _CALLS and acts:
        parts.texts.append(written_call(inner, at))
        parts.calls.append(_id_of(inner))
    elif kind in _ANSWERS and not acts:
        parts.error |= inner.get("is_error") is True or inner.get("status") == "error"
        begin = len(parts.texts)
        _add_content(_answer(inner), f"{at}.content", parts, False)
        parts.answers(begin, _id_of(inner))
    elif kind == "document" and (text := _plain_document(inner.get("source") or inner.get("document"))):
        parts.texts.append(text)
    elif kind in ("search_result", "tool_reference"):  # in the answers of Anthropic's tools
        about = [inner.get(key) for key in ("title", "source", "tool_name")]
        parts.texts += [text for text in about if isinstance(text, str)]
        _add_content(inner.get("content"), f"{at}.content", parts, False)
    elif kind == "json":
        parts.texts.append(json.dumps(inner if inner is not part else part[kind], ensure_ascii=False))
    elif kind in ("guardContent", "citationsContent"):
        _add_content(inner.get("content", inner.get("text")), at, parts, acts)
        parts.left_out["citation"] += len(inner.get("citations") or ())
    elif isinstance(kind, str) and (kind in _NO_TEXT or kind in _SECRET):
        parts.left_out[kind] += 1
        if isinstance(inner.get("transcript"), str):
            parts.add(inner["transcript"], acts)
    elif kind == "cachePoint":
        pass
    elif kind in _CALLS or kind in _ANSWERS or kind in _THOUGHTS:
        raise FieldError(f"{at}.type", f"is '{kind}' in a message of {'the agent' if acts else 'its world'}")
    else:
        raise FieldError(f"{at}.type", f"is {kind!r:.40}, a kind of part that is not known here")


def _plain_document(source: Any) -> str:
    """Of Anthropic, or of Cohere, which has no type."""
    plain = isinstance(source, dict) and source.get("type", "text") == "text" and isinstance(source.get("data"), str)
    return str(source["data"]) if plain else ""


def _answer(part: Mapping[str, Any]) -> Any:
    """What a tool returned: text, parts, or objects, which are written as JSON."""
    keys = ("content", "output", "result", "tool_result")
    given = next((part[key] for key in keys if part.get(key) is not None), None)
    if isinstance(given, dict) and "type" in given and "value" in given:  # as of the AI SDK
        given = given["value"]
    parts = given if isinstance(given, list) else []
    if any(isinstance(part, dict) and _kind(part) is None for part in parts):
        return json.dumps(given, ensure_ascii=False)  # a list that the tool returned
    plain = given is None or isinstance(given, str | list) or (isinstance(given, dict) and "type" in given)
    return given if plain else json.dumps(given, ensure_ascii=False)


def _thoughts(part: Mapping[str, Any], at: str, parts: Parts) -> list[str]:
    """Of a part ``thinking``, or of an item ``reasoning`` with a summary, a content, or both."""
    if part.get("redacted") is True:
        parts.left_out["reasoning"] += 1
        return []
    if isinstance(text := part.get("thinking") or part.get("text") or part.get("reasoning"), str):
        return [text.strip()] if text.strip() else []
    if isinstance(text, list):  # of Mistral
        return _plain_thoughts(text, at, parts)
    if isinstance(text := part.get("reasoningText"), dict):
        return _plain_thoughts([text], at, parts)
    if not (summary := part.get("content") or part.get("summary")):
        parts.left_out["reasoning"] += bool(part.get("encrypted_content") or part.get("redactedContent"))
        return []
    return _plain_thoughts(summary, at, parts)


def _plain_thoughts(listed: Any, at: str, parts: Parts) -> list[str]:
    texts: list[Any] = []
    keys = ("text", "summary", "thinking")
    for part in listed if isinstance(listed, list) else [listed]:
        within = isinstance(part, dict)
        texts.append(next((part[k] for k in keys if isinstance(part.get(k), str)), None) if within else part)
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise FieldError(at, f"is {listed!r:.60}, not text")
    parts.left_out["reasoning"] += sum(text is None for text in texts)  # encrypted
    parts.left_out += Counter()  # without counts of 0
    return [text.strip() for text in texts if text and text.strip()]
