"""Traces of model calls: LangSmith, Langfuse, OpenTelemetry with its dialects, OpenAI's Agents SDK, LiteLLM.

Each call of a model holds all messages so far and its answer, so a dialogue stands in a trace again and again. A call
continues the chain of calls whose messages, the last answer included, it begins with; earlier answers of tools may be
cut or changed in it. Of chains of one agent in one trace that begin alike the longest is the dialogue, and the calls of
the others (retries) are counted. Chains that begin otherwise, as those of sub-agents, are episodes of their own. The
traces of a session are one dialogue, and so are traces of a single call that go on word for word.

What tools answered to the last call stands in spans of their own. Scores and feedback of a trace are the fields
``score.<name>`` of its longest episode, for ``Reading.mapping``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from real_envs.importers.dialects import is_message, spoken
from real_envs.importers.drafts import EpisodeDraft, Format, Reading
from real_envs.importers.messages import AGENT, SYSTEM, decoded, read_message
from real_envs.importers.openai_chat import chat_draft
from real_envs.importers.records import Record, Sample, json_records, plain_suffix
from real_envs.importers.tables import PARQUET, parquet_records
from real_envs.store.codec import FieldError

Said = list[tuple[str, str]]  # who speaks, and what: without system prompts, and the agent's messages in a row as one
_MODEL, _TOOL, _AGENT, _TRACE = "model", "tool", "agent", "trace"
_PRODUCTS = {  # by the fields of a record
    "runs of LangSmith": "run_type inputs",
    "observations of Langfuse": "type traceId startTime, type trace_id start_time input",
    "traces of Langfuse": "id observations",
    "spans of OpenAI's Agents SDK": "object span_data, object workflow_name",
    "spans of OpenTelemetry": "attributes traceId, attributes trace_id, attributes context, resourceSpans",
    "calls of LiteLLM": "messages call_type, messages response.choices, messages response.output",
}
_HOLDERS = ("resourceSpans", "scopeSpans", "spans", "data", "runs", "traces", "trace")  # of spans, and none themselves
# Where the fields of a span are: the first of these paths that leads to something.
_PATHS = {
    "id": "span_id spanId context.span_id id request_id",
    "parent": "parent_run_id parentObservationId parent_observation_id parentSpanId parent_span_id parent_id",
    "trace": "trace_id traceId context.trace_id",
    "session": "extra.metadata.thread_id extra.metadata.session_id extra.metadata.conversation_id sessionId group_id "
    "attributes.session.id attributes.gen_ai.conversation.id attributes.langfuse.session.id metadata.session_id "
    "session_id",
    "start": "start_time startTime started_at startTimeUnixNano",
    "kind": "run_type span_data.type attributes.openinference.span.kind attributes.ai.operationId "
    "attributes.gen_ai.operation.name attributes.traceloop.span.kind attributes.langfuse.observation.type type",
    "name": "attributes.gen_ai.tool.name attributes.tool.name attributes.ai.toolCall.name span_data.name name",
    "model": "extra.metadata.ls_model_name extra.invocation_params.model span_data.model attributes.llm.model_name "
    "attributes.gen_ai.request.model attributes.ai.model.id model",
    "error": "error error_str statusMessage status_message status.message status.description",
    "asked": "inputs span_data.input attributes.gen_ai.input.messages attributes.gen_ai.prompt "
    "attributes.llm.input_messages attributes.ai.prompt.messages messages proxy_server_request.messages "
    "proxy_server_request.body.messages input attributes.input.value",
    "answered": "outputs span_data.output span_data.response attributes.gen_ai.output.messages "
    "attributes.gen_ai.completion attributes.llm.output_messages attributes.ai.response "
    "attributes.gen_ai.tool.call.result attributes.ai.toolCall.result response output attributes.output.value "
    "attributes.traceloop.entity.output",
}
_CAPTURED = "attributes.gen_ai.input.messages attributes.gen_ai.prompt attributes.llm.input_messages"
_KINDS = {
    **dict.fromkeys(("llm", "generation", "chat", "text_completion", "generate_content", "response"), _MODEL),
    **dict.fromkeys(("tool", "function", "execute_tool", "ai.toolcall"), _TOOL),
    **dict.fromkeys(("agent", "invoke_agent"), _AGENT),
}
_OF_AI_SDK = re.compile(r"ai\.\w+\.do(generate|stream)")  # the call itself, within one of the same messages
_CHOICES = ("choices", "generations", "candidates")  # the first is the answer
_WITHIN = (
    *("messages", "message", *_CHOICES, "output", "input", "contents", "prompt", "prompts", "response"),
    *("text", "completion", "content"),
)
_SYSTEMS = ("system", "instructions", "system_instruction", "systemInstruction")
_WRAPPERS = ({"message"}, {"tool_call"}, {"message_content"})  # of OpenInference
_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(slots=True)
class Span:
    """``asked`` and ``answered`` are the messages of a model's call, and whatever a tool was given and gave."""

    id: str
    parent: str
    trace: str
    session: str
    start: float | None
    kind: str
    name: Any
    model: Any
    error: Any
    asked: Any
    answered: Any
    scores: dict[str, Any] = field(default_factory=dict)
    scope: object = None  # the agent or tool that it is a part of
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Chain:
    """Calls of one dialogue, and its messages, each once."""

    calls: list[Span] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    said: Said = field(default_factory=list)
    systems: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)


class Traces(Format):
    name = "traces"
    about = "traces of LangSmith, Langfuse, OpenTelemetry and OpenAI's Agents SDK, logs of LiteLLM"
    marks = ("run_type", "traceId", "trace_id", "span_data", "attributes")

    def recognises(self, sample: Sample) -> str:
        product = product_of(sample.record)
        return f"its records are {product}" if product else ""

    def records(self, path: Path) -> Iterator[Record]:
        spans: dict[object, Span] = {}
        for record in parquet_records(path) if plain_suffix(path) == PARQUET else json_records(path):
            if isinstance(record.value, FieldError):
                yield record
                continue
            inside = list(_inside(record.value))
            if not inside:
                yield Record(record.where, FieldError("", "is no span of a trace, and holds none"))
            for value, trace in inside:
                try:
                    span = _span(value, trace)
                    key = (span.trace, span.id) if span.id else len(spans)
                    again = "earlier version of a call"
                    span.left_out[again] += 1 + spans[key].left_out[again] if key in spans else 0
                    spans[key] = span
                except FieldError as error:
                    yield Record(record.where, error)
        yield from _episodes(list(spans.values()))

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        if not isinstance(value, dict) or not isinstance(value.get("left_out"), Counter):
            raise FieldError("", "is no dialogue of a trace")
        draft = chat_draft({key: kept for key, kept in value.items() if key != "left_out"}, reading)
        return replace(draft, left_out=Counter(draft.left_out) + value["left_out"])


def product_of(record: Any) -> str:
    """What a record is, or holds, such as "runs of LangSmith"; "" where it is nothing of a trace."""
    if isinstance(record, list):
        return product_of(record[0]) if record else ""
    if not isinstance(record, dict):
        return ""
    answer = record.get("response") if isinstance(record.get("response"), dict) else {}
    keys = {*(str(key).partition(".")[0] for key in record), *record, *(f"response.{key}" for key in answer or ())}
    known = ((name, fields) for name, alike in _PRODUCTS.items() for fields in alike.split(", "))
    named = next((name for name, fields in known if keys.issuperset(fields.split())), "")
    inner = (record[key] for key in _HOLDERS if isinstance(record.get(key), list | dict))
    return named or next(filter(None, map(product_of, inner)), "")


def _inside(value: Any, trace: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The spans in a record, and the trace in which they stand."""
    if isinstance(value, list):
        for inner in value:
            yield from _inside(inner, trace)
    elif isinstance(value, dict):
        if product_of(value) and not any(key in value for key in _HOLDERS):
            yield value, trace
            trace = str(_first(value, "trace") or trace or value.get("id") or "")
        for key in (*_HOLDERS, "observations", "child_runs"):
            if isinstance(value.get(key), list | dict):
                yield from _inside(value[key], trace)


def _span(value: dict[str, Any], trace: str) -> Span:
    """Raises ``FieldError``: it is a call of a model whose messages are in no known form."""
    value = _nested([value]) if any(str(key).startswith("attributes.") for key in value) else value
    events = value["events"] if isinstance(value.get("events"), list) else []
    logged = [event.get("attributes") for event in events if isinstance(event, dict)]  # prompts, of some
    value = value | {"attributes": _nested([*logged, value.get("attributes")])}
    if "run_type" in value:
        value = value | {"session_id": None}  # the project
    span = Span(**{name: _first(value, name) for name in _PATHS})
    span.id, span.parent, span.trace, span.session = (
        "" if one is None else str(one) for one in (span.id, span.parent, span.trace, span.session)
    )
    word, called = str(span.kind or "").lower(), "messages" in value and "run_type" not in value
    span.kind = _KINDS.get(word, _MODEL if _OF_AI_SDK.fullmatch(word) or called or _at(value, _CAPTURED) else "")
    if "observations" in value or value.get("object") == _TRACE:
        span.kind, span.trace = _TRACE, span.id
    span.trace = span.trace or trace or ("" if called else span.id)
    span.start = _seconds(span.start)
    scores = value.get("scores") if isinstance(value.get("scores"), list) else []
    span.scores = {f"score.{one.get('name')}": one.get("value") for one in scores or () if isinstance(one, dict)}
    if isinstance(feedback := value.get("feedback_stats"), dict):
        span.scores = {f"score.{name}": one.get("avg") for name, one in feedback.items() if isinstance(one, dict)}
    if span.kind == _MODEL:
        system = _at(value, "attributes.gen_ai.system_instructions")
        span.asked = _messages(span.asked, "user", span.left_out)
        span.asked[:0] = [{"role": "system", "content": decoded(system)}] if system else []
        if isinstance(span.answered, dict) and "toolCalls" in span.answered:  # of the AI SDK
            span.answered = {"content": span.answered.get("text"), "tool_calls": decoded(span.answered["toolCalls"])}
        span.answered = _messages(span.answered, "assistant", span.left_out)
    return span


def _first(value: Mapping[str, Any], name: str) -> Any:
    return _at(value, _PATHS[name])


def _at(value: Mapping[str, Any], paths: str) -> Any:
    for path in paths.split():
        inner: Any = value
        for key in path.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
        if inner not in _NOTHING:
            return inner
    return None


def _nested(sources: Sequence[Any]) -> dict[str, Any]:
    """``{"llm": {"input_messages": [{...}]}}`` of ``llm.input_messages.0.message.role`` and the like, or of OTLP."""
    made: dict[str, Any] = {}
    for source in sources:
        pairs = list(source.items()) if isinstance(source, dict) else []
        if isinstance(source, list):
            pairs = [(pair.get("key"), _plain(pair.get("value"))) for pair in source if isinstance(pair, dict)]
        for key, value in pairs:
            *above, last = str(key).split(".", 20)
            inner = made
            for step in above:
                inner[step] = inner[step] if isinstance(inner.get(step), dict) else {}
                inner = inner[step]
            if not isinstance(inner.get(last), dict):  # else its parts are there
                inner[last] = value
    return {key: _listed(value) for key, value in made.items()}


def _plain(value: Any) -> Any:
    """Of a value in OTLP's JSON, such as ``{"stringValue": "a"}``."""
    inner = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value
    values = inner.get("values") if isinstance(inner, dict) else None
    if not isinstance(values, list):
        return inner
    pairs = all(isinstance(one, dict) and "key" in one for one in values)
    return _nested([values]) if pairs else [_plain(one) for one in values]


def _listed(value: Any) -> Any:
    """With lists for objects of the keys 0, 1, ..., and without the wrappers of OpenInference."""
    if isinstance(value, dict) and value.keys() in _WRAPPERS and isinstance(inner := next(iter(value.values())), dict):
        value = {"content": inner.get("contents")} | {key: kept for key, kept in inner.items() if key != "contents"}
        value = inner if "contents" not in inner else value
    if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
        value = [value[key] for key in sorted(value, key=int)]
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, list) else value


def _seconds(value: Any) -> float | None:
    try:
        if isinstance(value, datetime) or (isinstance(value, str) and not value.isdecimal()):
            moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _messages(value: Any, role: str, left_out: Counter[str]) -> list[Any]:
    """Messages, whatever they are wrapped in. Raises ``FieldError``: in nothing that is known."""
    value = decoded(value)
    if value in _NOTHING:
        return []
    if isinstance(value, list):
        if isinstance(value[0], list):
            left_out["other batch"] += len(value) - 1
            return _messages(value[0], role, left_out)
        parts = all(isinstance(one, dict) and isinstance(one.get("type"), str) and not is_message(one) for one in value)
        if parts:
            return [{"role": role, "content": value}]
        return [message for one in value for message in _messages(one, role, left_out)]
    if not isinstance(value, dict):
        return [{"role": role, "content": value}]
    if is_message(value):
        return [value]
    if isinstance(value.get("content"), str | list) or value.get("tool_calls"):
        return [{"role": role, **value}]
    for key in _WITHIN:
        if (inner := value.get(key)) in _NOTHING:
            continue
        if key in _CHOICES and isinstance(inner, list):
            inner = inner[0] if isinstance(inner[0], list) else inner  # a batch
            left_out["other answer"] += max(0, len(inner) - 1)
            inner = inner[:1]
        ends = {name: value[name] for name in ("finish_reason", "stop_reason") if isinstance(value.get(name), str)}
        system = [{"role": "system", "content": value[name]} for name in _SYSTEMS if value.get(name)]
        *before, last = (*system, *_messages(inner, role, left_out)) or ({},)
        return [*before, {**last, **ends}] if last else []
    where = "outputs" if role == "assistant" else "inputs"
    raise FieldError(where, f"are in no form that is known here: there are {', '.join(map(str, value))}")


def _said(messages: Sequence[Any]) -> tuple[Said, list[int], list[tuple[str, int]]]:
    """What messages say, with the number of messages up to each; and the system prompts, with theirs."""
    said: Said = []
    ends: list[int] = []
    systems: list[tuple[str, int]] = []
    for at, value in enumerate(messages, start=1):
        for message in spoken(decoded(value))[0]:
            try:
                speaker, parts = read_message(message, "messages")
                text = parts.text.strip()
            except FieldError:  # its draft tells
                speaker, text = "", repr(message)
            if speaker == SYSTEM:
                systems.append((text, at))
            elif speaker == AGENT and said and said[-1][0] == AGENT:
                said[-1], ends[-1] = (AGENT, f"{said[-1][1]}\n{text}".strip()), at
            elif text:
                said.append((speaker, text))
                ends.append(at)
    return said, ends, systems


def _shared(before: Said, now: Said) -> int:
    """How much of ``now`` stands for ``before``: up to its last, with all that the agent said, or a head and a tail."""
    if not before or not now or before[-1] not in now or now[0] not in before:
        return 0
    size = len(now) - now[::-1].index(before[-1])
    had, has = ([text for speaker, text in said if speaker == AGENT] for said in (before, now[:size]))
    head = 0
    while head < min(len(had), len(has)) and had[head] == has[head]:
        head += 1
    tail = has[head:]
    return size if (had[len(had) - len(tail) :] == tail if tail else head == len(had)) else 0


def _chains(calls: Sequence[Span], tools: Sequence[Span], loose: bool) -> list[Chain]:
    """``loose``: calls of one trace or session, which need not go on word for word."""
    chains: list[Chain] = []
    going: dict[tuple[object, ...], list[Chain]] = defaultdict(list)  # by all that was said
    for call in calls:
        said, ends, systems = _said(call.asked)
        sizes = (n for n in range(len(said), 0, -1) if going.get(tuple(said[:n])))
        size = next(sizes, 0)
        chain = going[tuple(said[:size])][-1] if size else None
        if chain is None and loose:
            rated = ((_shared(each.said, said), sum(one in said for one in each.said), each) for each in chains)
            size, _, chain = max((one for one in rated if one[0]), key=lambda one: one[1], default=(0, 0, None))
        if chain is None and loose and call.asked and all(map(_is_answer, call.asked)):  # what is new, and no more
            chain = next((each for each in reversed(chains) if each.calls[-1].scope == call.scope), None)
        if chain is None:
            chains.append(chain := Chain())
        else:
            going[tuple(chain.said)].remove(chain)
        cut = ends[size - 1] if size else 0
        new = call.asked[cut:] or (_answers(chain, tools, call.start) if chain.calls else [])
        changed = [text for text, at in systems if at <= cut and text not in chain.systems] if chain.calls else []
        chain.left_out += call.left_out + Counter({"changed system prompt": len(changed)})
        chain.systems |= {text for text, _ in systems}
        chain.messages += [*new, *call.answered]
        chain.said = _said(chain.messages)[0] if size < len(chain.said) else _said([*call.asked, *call.answered])[0]
        chain.calls.append(call)
        going[tuple(chain.said)].append(chain)
    for chain in chains:
        chain.messages += _answers(chain, tools, None)
    return chains


def _is_answer(message: Any) -> bool:
    given = message if isinstance(message, dict) else {}
    return given.get("role") == _TOOL or str(given.get("type")).endswith("_output")


def _answers(chain: Chain, tools: Sequence[Span], until: float | None) -> list[Any]:
    """What tools gave that the last call of a chain asked for, as far as spans say it."""
    call, made = chain.calls[-1], []
    wanted = Counter(re.findall(r"^([^\s(]+)\(", chain.said[-1][1] if chain.said else "", re.MULTILINE))
    for tool in tools:
        name = str(tool.name).removeprefix("execute_tool ")
        early = None not in (tool.start, call.start) and (tool.start or 0) < (call.start or 0)
        late = None not in (tool.start, until) and (tool.start or 0) >= (until or 0)
        if (tool.trace, tool.scope) != (call.trace, call.scope) or early or late or not wanted[name]:
            continue
        wanted[name] -= 1
        given = decoded(tool.answered)
        while isinstance(given, dict) and len(given) == 1 and given.keys() <= {"output", "content", "result"}:
            given = decoded(next(iter(given.values())))
        if isinstance(given, dict) and is_message(given):
            made.append(given)
        elif given is not None or tool.error is not None:
            failed = given is None
            part = {"type": "tool_result", "content": tool.error if failed else given, "is_error": failed}
            made.append({"role": _TOOL, "content": [part]})
    return made


def _episodes(spans: list[Span]) -> Iterator[Record]:
    if all(span.start is not None for span in spans if span.kind != _TRACE):
        spans = sorted(spans, key=lambda span: span.start or 0.0)
    by_id = {(span.trace, span.id): span for span in spans if span.id and span.kind != _TRACE}
    sessions = {span.trace: span.session for span in reversed(spans) if span.trace and span.session}
    outer = set()  # ids of calls that hold another one, of the same dialogue
    groups: dict[object, list[Span]] = defaultdict(list)
    scores: dict[object, dict[str, Any]] = defaultdict(dict)
    for number, span in enumerate(spans, start=1):
        scores[span.trace] |= span.scores
        name = sessions.get(span.trace) or span.session or span.trace
        groups[f"trace {name}" if name else f"call {span.id or number}"].append(span)
        above, seen = by_id.get((span.trace, span.parent)), {span.id}
        while above is not None and above.id not in seen:
            seen.add(above.id)
            if above.kind in (_AGENT, _TOOL):
                span.scope = span.scope or above.id
            if above.kind == span.kind == _MODEL and span.answered:
                outer.add((above.trace, above.id))
            above = by_id.get((above.trace, above.parent))
    single: list[Span] = []  # calls of traces that have no other: each call of a dialogue may be a trace
    for name, group in groups.items():
        calls = [span for span in group if span.kind == _MODEL and (span.trace, span.id) not in outer]
        tools = [span for span in group if span.kind == _TOOL]
        whole = [call for call in calls if call.asked and call.answered]
        if not whole:
            yield Record(name, FieldError("", "has no call of a model with messages and an answer"))
        elif len(calls) == 1 and not tools:
            single += whole
        else:
            failed = Counter({"call without messages or an answer": len(calls) - len(whole)})
            broken = None if calls[-1] is whole[-1] else calls[-1].error or True
            yield from _dialogues(_longest(_chains(whole, tools, True)), scores, failed, broken)
    yield from _dialogues(_chains(single, [], False), scores, Counter(), None)


def _longest(chains: list[Chain]) -> list[Chain]:
    """Of those that begin alike in a trace, longest first."""
    kept: dict[object, Chain] = {}
    for chain in sorted(chains, key=lambda chain: -len(chain.said)):
        speakers = [speaker for speaker, _ in chain.said]
        start = chain.said[: speakers.index(AGENT) if AGENT in speakers else None]
        longest = kept.setdefault((chain.calls[0].trace, chain.calls[0].scope, tuple(start)), chain)
        longest.left_out["call beside the dialogue"] += len(chain.calls) if longest is not chain else 0
    return list(kept.values())


def _dialogues(
    chains: list[Chain], scores: dict[object, dict[str, Any]], failed: Counter[str], broken: Any
) -> Iterator[Record]:
    """``failed`` and ``broken`` are of the first."""
    for number, chain in enumerate(chains, start=1):
        call = chain.calls[-1]
        value = {"messages": chain.messages, "trace": call.trace, "session": call.session, "error": broken}
        for trace in {each.trace: None for each in chain.calls}:
            value |= scores.get(trace, {})
            scores[trace] = dict.fromkeys(scores.get(trace, ()))  # unknown of the trace's other episodes
        value |= {"agent": call.model if isinstance(call.model, str) else None}
        yield Record(f"trace {call.trace or call.id}, dialogue {number}", value | {"left_out": chain.left_out + failed})
        failed, broken = Counter(), None
