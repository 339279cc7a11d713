"""One span of a trace: what it is, and the messages of a model's call, whichever product logged it.

LangSmith, Langfuse, OpenTelemetry (GenAI conventions, OpenLLMetry, OpenInference, the AI SDK), OpenAI's Agents SDK and
LiteLLM differ in names: ``_PATHS`` has them. Attributes of OpenTelemetry become objects before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from real_envs.importers.dialects import is_message
from real_envs.importers.events import objects
from real_envs.importers.messages import decoded
from real_envs.store.codec import FieldError

MODEL, TOOL, SUB_AGENT, TRACE = "model", "tool", "agent", "trace"
_PRODUCTS = {  # by the fields of a record
    "calls of Weave": "op_name inputs started_at",
    "spans of Braintrust": "span_attributes root_span_id",
    "spans of MLflow": "span_id span_type inputs",
    "runs of LangSmith": "run_type inputs",
    "observations of Langfuse": "type traceId startTime, type trace_id start_time input",
    "traces of Langfuse": "id observations",
    "spans of OpenAI's Agents SDK": "object span_data, object workflow_name",
    "spans of OpenTelemetry": "attributes traceId, attributes trace_id, attributes context, resourceSpans",
    "log records of OpenTelemetry": "resourceLogs",
    "calls of Helicone": "request_body response_body",
    "calls of LiteLLM": "messages call_type, messages response.choices, messages response.output",
}
_HOLDERS = (
    "resourceSpans",
    "scopeSpans",
    "resourceLogs",
    "scopeLogs",
    "logRecords",
    "spans",
    "data",
    "runs",
    "traces",
    "trace",
)  # of spans, and none themselves
# Where the fields of a span are: the first of these paths that leads to something.
_PATHS = {
    "id": "span_id spanId context.span_id id request_id",
    "parent": "parent_run_id parentObservationId parent_observation_id parentSpanId parent_span_id parent_id",
    "trace": "trace_id traceId context.trace_id root_span_id",
    "session": "extra.metadata.thread_id extra.metadata.session_id extra.metadata.conversation_id sessionId group_id "
    "attributes.session.id attributes.gen_ai.conversation.id attributes.langfuse.session.id metadata.session_id "
    "session_id",
    "start": "start_time startTime started_at startTimeUnixNano start_time_unix_nano metrics.start start_time_ns "
    "timeUnixNano observedTimeUnixNano",
    "kind": "run_type span_data.type attributes.openinference.span.kind attributes.ai.operationId "
    "attributes.gen_ai.operation.name attributes.traceloop.span.kind attributes.langfuse.observation.type "
    "attributes.mlflow.spanType span_attributes.type span_type type",
    "name": "attributes.gen_ai.tool.name attributes.tool.name attributes.ai.toolCall.name "
    "attributes.traceloop.entity.name span_data.name "
    "span_attributes.name name",
    "model": "extra.metadata.ls_model_name extra.invocation_params.model span_data.model attributes.llm.model_name "
    "attributes.gen_ai.request.model attributes.ai.model.id model metadata.model inputs.model",
    "error": "error error_str statusMessage status_message status.message status.description",
    "asked": "inputs span_data.input attributes.gen_ai.input.messages attributes.gen_ai.prompt "
    "attributes.llm.input_messages attributes.ai.prompt.messages messages proxy_server_request.messages "
    "proxy_server_request.body.messages attributes.mlflow.spanInputs request_body input "
    "attributes.input.value",
    "answered": "outputs span_data.output span_data.response attributes.gen_ai.output.messages "
    "attributes.gen_ai.completion attributes.llm.output_messages attributes.ai.response "
    "attributes.mlflow.spanOutputs response_body attributes.gen_ai.tool.call.result attributes.ai.toolCall.result "
    "response output attributes.output.value attributes.traceloop.entity.output",
}
_SYSTEM = "attributes.gen_ai.system_instructions answered.instructions proxy_server_request.body.system"
_CAPTURED = "attributes.gen_ai.input.messages attributes.gen_ai.prompt attributes.llm.input_messages"
_KINDS = {
    **dict.fromkeys(("llm", "generation", "chat", "chat_model", "text_completion", "generate_content"), MODEL),
    "response": MODEL,
    **dict.fromkeys(("tool", "function", "execute_tool", "ai.toolcall"), TOOL),
    **dict.fromkeys(("agent", "invoke_agent"), SUB_AGENT),
}
_OF_AI_SDK = re.compile(r"ai\.\w+\.do(generate|stream)")  # the call itself, within one of the same messages
_EVENT = re.compile(r"gen_ai\.(?:(system|user|assistant|tool)\.message|choice)")
_CHOICES = ("choices", "generations", "candidates")  # the first is the answer
_WITHIN = (
    *("messages", "message", *_CHOICES, "output", "input", "contents", "prompt", "prompts", "response"),
    *("text", "completion", "content", "args"),
)
_OF_ANSWERS = ("finish_reason", "stop_reason", "reasoning", "reasoning_content")  # beside the message
_SYSTEMS = ("system", "instructions", "system_instruction", "systemInstruction")
_DOTTED = ("message.", "tool_call.", "message_content.")  # keys of Phoenix's dataframes
_WRAPPERS = ({"message"}, {"tool_call"}, {"message_content"})  # of OpenInference
_NOTHING: tuple[Any, ...] = (None, "", "None", "null", [], {})  # some write null as a text


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
    inner = (record[key] for key in (*_HOLDERS, "observations") if isinstance(record.get(key), list | dict))
    return named or next(filter(None, map(product_of, inner)), "")


def spans_in(value: Any, trace: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The spans in a record, and the trace in which they stand."""
    if isinstance(value, list):
        for inner in value:
            yield from spans_in(inner, trace)
    elif isinstance(value, dict):
        if isinstance(value.get("trace"), dict) and "observations" in value:  # as Langfuse's pages export it
            value = value["trace"] | {"observations": value["observations"]}
        if isinstance(logs := value.get("logRecords"), list):
            value = {"logRecords": list(_with_events(logs))}
        if product_of(value) and not any(key in value for key in _HOLDERS):
            yield value, trace
            trace = str(_at(value, _PATHS["trace"]) or trace or value.get("id") or "")
        for key in (*_HOLDERS, "observations", "child_runs"):
            if isinstance(value.get(key), list | dict):
                yield from spans_in(value[key], trace)


def _with_events(logs: list[Any]) -> Iterator[Any]:
    """Log records of OpenTelemetry; those that are a message each are the events of one span."""
    spans: dict[tuple[str, str], dict[str, Any]] = {}
    for log in logs:
        about = _nested([log.get("attributes")]) if isinstance(log, dict) else {}
        name = _at(about, "event.name") or (log.get("eventName") if isinstance(log, dict) else None)
        if not _EVENT.fullmatch(str(name)):
            yield log
            continue
        place = (str(log.get("traceId")), str(log.get("spanId")))
        span = spans.setdefault(place, {"attributes": [], **log, "type": "chat", "events": []})
        span["events"].append({"name": name, "attributes": {"gen_ai.event.content": _plain(log.get("body"))}})
    yield from spans.values()


def span_of(value: dict[str, Any], trace: str) -> Span:
    """Raises ``FieldError``: it is a call of a model whose messages are in no known form."""
    value = _nested([value]) if any(str(key).startswith("attributes.") for key in value) else value
    events = value["events"] if isinstance(value.get("events"), list) else []
    logged = [event.get("attributes") for event in events if isinstance(event, dict)]  # prompts, of some
    value = value | {"attributes": _nested([*logged, decoded(value.get("attributes"))])}
    inside = decoded(_at(value, "attributes.events"))  # of Pydantic AI
    for event in inside if isinstance(inside, list) else ():
        if isinstance(event, dict):
            events = [*events, {"name": event.get("event.name"), "attributes": {"gen_ai.event.content": event}}]
    if "run_type" in value:
        value = value | {"session_id": None}  # the project
    fields = {name: _at(value, paths) for name, paths in _PATHS.items()}
    fields |= {name: str(fields[name] or "") for name in ("id", "parent", "trace", "session")}
    span = Span(**fields)
    word, called = str(span.kind or "").lower().strip('"'), "messages" in value and "run_type" not in value
    called |= "request_body" in value or ("op_name" in value and _at(value, "inputs.messages") is not None)
    span.kind = _KINDS.get(word, MODEL if _OF_AI_SDK.fullmatch(word) or called or _at(value, _CAPTURED) else "")
    if "observations" in value or value.get("object") == TRACE:
        span.kind, span.trace = TRACE, span.id
    span.trace = span.trace or trace or ("" if called else span.id)
    span.start = _seconds(span.start)
    scores = objects(value.get("scores"))
    named = ((one, one.get("stringValue") if one.get("value") is None else one["value"]) for one in scores)
    span.scores = {f"score.{one.get('name')}": score for one, score in named}
    if isinstance(value.get("scores"), dict):
        span.scores = {f"score.{name}": score for name, score in value["scores"].items()}
    if isinstance(feedback := value.get("feedback_stats"), dict):
        span.scores = {f"score.{name}": one.get("avg") for name, one in feedback.items() if isinstance(one, dict)}
    if span.kind == MODEL:
        asked, answered = _of_events(events)
        span.asked, span.answered = span.asked or asked, span.answered or answered
        span.answered = decoded(span.answered)
        system = _at({"answered": span.answered} | value, _SYSTEM)
        span.asked = _with_roles(_messages(span.asked, "user", span.left_out))
        span.asked[:0] = [{"role": "system", "content": decoded(system)}] if system else []
        if isinstance(span.answered, dict) and "toolCalls" in span.answered:  # of the AI SDK
            span.answered |= {
                "content": span.answered.get("text"),
                "tool_calls": decoded(span.answered.pop("toolCalls")),
            }
        if isinstance(span.answered, list) and _are_choices(span.answered):
            span.left_out["other answer"] += len(span.answered) - 1
            span.answered = span.answered[:1]
        span.answered = _messages(span.answered, "assistant", span.left_out)
    return span


def _are_choices(answers: list[Any]) -> bool:
    """Whether each answer is an alternative to the others, which OpenTelemetry says by a reason why each one ended."""
    return len(answers) > 1 and all(isinstance(one, dict) and "finish_reason" in one for one in answers)


def _of_events(events: list[Any]) -> tuple[list[Any], list[Any]]:
    """The messages and answers of OpenTelemetry's older conventions, an event each."""
    asked: list[Any] = []
    answered: list[Any] = []
    for event in events:
        match = _EVENT.fullmatch(str(event.get("name"))) if isinstance(event, dict) else None
        given = _nested([event.get("attributes")]) if match else {}
        body = decoded(_at(given, "gen_ai.event.content")) or given
        if match and match[1] and isinstance(body, dict):
            asked.append({"role": match[1], **body, "tool_calls": decoded(body.get("tool_calls"))})
        elif match and isinstance(body, dict):
            answered.append({"finish_reason": "", **body})
    return asked, answered


def _at(value: Mapping[str, Any], paths: str) -> Any:
    for path in paths.split():
        inner: Any = value
        for key in path.split("."):
            inner = decoded(inner)
            inner = inner.get(key) if isinstance(inner, dict) else None
        if inner not in _NOTHING:
            return inner
    return None


def _nested(sources: Sequence[Any]) -> dict[str, Any]:
    """``{"llm": {"input_messages": [{...}]}}`` of ``llm.input_messages.0.message.role`` and the like, or of OTLP."""
    made: dict[str, Any] = {}
    for source in sources:
        pairs = list(source.items()) if isinstance(source, dict) else []
        if isinstance(source, list):  # of OTLP
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
    """With lists for objects of the keys 0, 1, ..., and without the wrappers of OpenInference, dotted or not."""
    if isinstance(value, dict) and any(str(key).startswith(_DOTTED) for key in value):
        return _listed(_nested([value]))
    if isinstance(value, dict) and value.keys() in _WRAPPERS and isinstance(inner := next(iter(value.values())), dict):
        value = {"content": inner.get("contents")} | {key: kept for key, kept in inner.items() if key != "contents"}
        value = inner if "contents" not in inner else value
    if isinstance(value, dict) and value and all(str(key).isdecimal() and len(key) < 10 for key in value):
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
    content = value.get("content")
    if value.get("role") == TOOL and isinstance(content, dict) and isinstance(content.get("function"), dict):
        return []  # what a tool is, among the messages
    if is_message(value):
        return [value]
    if "toolName" in value:  # a call of the AI SDK alone
        return [{"role": role, "content": None, "tool_calls": [value]}]
    if isinstance(content, str | list) or value.get("tool_calls"):
        return [{"role": role, **value}]
    for key in _WITHIN:
        if (inner := value.get(key)) in _NOTHING:
            continue
        if key in _CHOICES and isinstance(inner, list):
            inner = inner[0] if isinstance(inner[0], list) else inner  # a batch
            left_out["other answer"] += max(0, len(inner) - 1)
            inner = inner[:1]
        ends = {name: value[name] for name in _OF_ANSWERS if isinstance(value.get(name), str)}
        asks = role == "user"
        system = [{"role": "system", "content": value[name]} for name in _SYSTEMS if asks and value.get(name)]
        *before, last = (*system, *_messages(inner, role, left_out)) or ({},)
        return [*before, {**last, **ends}] if last else []
    where = "outputs" if role == "assistant" else "inputs"
    raise FieldError(where, f"are in no form that is known here: there are {', '.join(map(str, value))}")


def _with_roles(messages: list[Any]) -> list[Any]:
    """Some handlers write the name of a tool as the role of its answer."""
    lists = [_at(one, "tool_calls additional_kwargs.tool_calls") for one in messages if isinstance(one, dict)]
    calls = [call for given in lists if isinstance(given, list) for call in given if isinstance(call, dict)]
    names = {str((call["function"] if isinstance(call.get("function"), dict) else call).get("name")) for call in calls}
    named = [isinstance(one, dict) and isinstance(one.get("role"), str) and one["role"] in names for one in messages]
    return [{**one, "role": TOOL} if is_name else one for one, is_name in zip(messages, named, strict=True)]
