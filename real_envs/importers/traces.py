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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from real_envs.importers.dialects import is_message, spoken
from real_envs.importers.drafts import EpisodeDraft, Format, Reading
from real_envs.importers.messages import AGENT, SYSTEM, decoded, read_message
from real_envs.importers.openai_chat import chat_draft
from real_envs.importers.records import Record, Sample, json_records, plain_suffix
from real_envs.importers.spans import MODEL, SUB_AGENT, TOOL, TRACE, Span, product_of, span_of, spans_in
from real_envs.importers.tables import TABLES, table_records
from real_envs.store.codec import FieldError

Utterances = list[
    tuple[str, str]
]  # who speaks, and what: without system prompts, and the agent's messages in a row as one


@dataclass(slots=True, eq=False)
class Chain:
    """Calls of one dialogue, and its messages, each once."""

    calls: list[Span] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    utterances: Utterances = field(default_factory=list)
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
        for record in table_records(path) if plain_suffix(path) in TABLES else json_records(path):
            if isinstance(record.value, FieldError):
                yield record
                continue
            try:
                inside = list(spans_in(record.value))
            except RecursionError:
                inside = []
            if not inside:
                yield Record(record.where, FieldError("", "is no span of a trace, and holds none"))
            for value, trace in inside:
                try:
                    span = span_of(value, trace)
                except (FieldError, RecursionError) as error:
                    broken = error if isinstance(error, FieldError) else FieldError("", "is nested too deeply")
                    yield Record(record.where, broken)
                    continue
                key = (span.trace, span.id) if span.id else len(spans)
                again, before = "earlier version of a call", spans.get(key)
                logs = {"body", "events"} <= value.keys()  # of one call in several batches, or sent twice
                if before and logs and (before.asked, before.answered) != (span.asked, span.answered):
                    span.asked, span.answered = before.asked + span.asked, before.answered + span.answered
                    span.left_out += before.left_out
                elif before:
                    span.left_out[again] += 1 + before.left_out[again]
                spans[key] = span
        yield from _episodes(list(spans.values()))

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        if not isinstance(value, dict) or not isinstance(value.get("left_out"), Counter):
            raise FieldError("", "is no dialogue of a trace")
        draft = chat_draft({key: kept for key, kept in value.items() if key != "left_out"}, reading)
        return replace(draft, left_out=Counter(draft.left_out) + value["left_out"])


def _utterances(messages: Sequence[Any]) -> tuple[Utterances, list[int], list[tuple[str, int]]]:
    """What messages say, with the number of messages up to each; and the system prompts, with theirs."""
    utterances: Utterances = []
    ends: list[int] = []
    systems: list[tuple[str, int]] = []
    for at, value in enumerate(messages, start=1):
        for message in spoken(decoded(value))[0]:
            try:
                speaker, parts = read_message(message, "messages")
                text = parts.text.strip()
            except (FieldError, RecursionError):  # its draft tells
                speaker, text = "", f"message {at}"
            if speaker == SYSTEM:
                systems.append((text, at))
            elif speaker == AGENT and utterances and utterances[-1][0] == AGENT:
                utterances[-1], ends[-1] = (AGENT, f"{utterances[-1][1]}\n{text}".strip()), at
            elif text:
                utterances.append((speaker, text))
                ends.append(at)
    return utterances, ends, systems


def _shared(before: Utterances, now: Utterances) -> int:
    """How much of ``now`` stands for ``before``: up to its last, with all that the agent said, or a head and a tail."""
    if not before or not now or before[-1] not in now or now[0] not in before:
        return 0
    size = len(now) - now[::-1].index(before[-1])
    had, has = ([text for speaker, text in utterances if speaker == AGENT] for utterances in (before, now[:size]))
    head = 0
    while head < min(len(had), len(has)) and had[head] == has[head]:
        head += 1
    tail = has[head:]
    return size if (had[len(had) - len(tail) :] == tail if tail else head == len(had)) else 0


def _chains(calls: Sequence[Span], tools: Sequence[Span], loose: bool) -> list[Chain]:
    """``loose``: calls of one trace or session, which need not go on word for word."""
    chains: list[Chain] = []
    going: dict[tuple[object, ...], list[Chain]] = defaultdict(list)  # by all that was said
    lengths: set[int] = set()
    for call in calls:
        utterances, ends, systems = _utterances(call.asked)
        sizes = (n for n in sorted(lengths, reverse=True) if n <= len(utterances) and going.get(tuple(utterances[:n])))
        size = next(sizes, 0)
        chain = going[tuple(utterances[:size])][-1] if size else None
        if chain is None and loose:
            rated = (
                (_shared(each.utterances, utterances), sum(one in utterances for one in each.utterances), each)
                for each in chains
            )
            size, _, chain = max((one for one in rated if one[0]), key=lambda one: one[1], default=(0, 0, None))
        if chain is None and loose and call.asked and all(map(_is_answer, call.asked)):  # what is new, and no more
            chain = next((each for each in reversed(chains) if each.calls[-1].scope == call.scope), None)
        if chain is None:
            chains.append(chain := Chain())
        else:
            going[tuple(chain.utterances)].remove(chain)
        cut = ends[size - 1] if size else 0
        new = call.asked[cut:] or (_answers(chain, tools, call.start) if chain.calls else [])
        changed = [text for text, at in systems if at <= cut and text not in chain.systems] if chain.calls else []
        chain.left_out += call.left_out + Counter({"changed system prompt": len(changed)})
        chain.systems |= {text for text, _ in systems}
        chain.messages += [*new, *call.answered]
        chain.utterances = (
            _utterances(chain.messages)[0]
            if size < len(chain.utterances)
            else _utterances([*call.asked, *call.answered])[0]
        )
        chain.calls.append(call)
        going[tuple(chain.utterances)].append(chain)
        lengths.add(len(chain.utterances))
    for chain in chains:
        chain.messages += _answers(chain, tools, None)
    return chains


def _is_answer(message: Any) -> bool:
    given = message if isinstance(message, dict) else {}
    return given.get("role") == TOOL or str(given.get("type")).endswith("_output")


def _answers(chain: Chain, tools: Sequence[Span], until: float | None) -> list[Any]:
    """What tools gave that the last call of a chain asked for, as far as spans say it, in the order of the calls."""
    call, made, used = chain.calls[-1], dict[int, Any](), set()
    wanted = re.findall(r"^([^\s(]+)\(", chain.utterances[-1][1] if chain.utterances else "", re.MULTILINE)
    for tool in tools:
        name = re.split(r"[ .]", str(tool.name))[-1]  # of "execute_tool look", "tool.look"
        early = None not in (tool.start, call.start) and (tool.start or 0) < (call.start or 0)
        late = None not in (tool.start, until) and (tool.start or 0) >= (until or 0)
        elsewhere = (tool.trace, tool.scope) != (call.trace, call.scope) or tool.parent in used
        if elsewhere or early or late or name not in wanted:
            continue
        at = wanted.index(name)
        wanted[at] = ""
        used.add(tool.id or None)
        given = decoded(tool.answered)
        while isinstance(given, dict) and len(given) == 1 and given.keys() <= {"output", "content", "result"}:
            given = decoded(next(iter(given.values())))
        if isinstance(given, dict) and is_message(given):
            made[at] = given
        elif given is not None or tool.error is not None:
            failed = given is None
            part = {"type": "tool_result", "content": tool.error if failed else given, "is_error": failed}
            made[at] = {"role": TOOL, "content": [part]}
    return [made[at] for at in sorted(made)]


def _episodes(spans: list[Span]) -> Iterator[Record]:
    if all(span.start is not None for span in spans if span.kind != TRACE):
        spans = sorted(spans, key=lambda span: span.start or 0.0)
    by_id = {(span.trace, span.id): span for span in spans if span.id and span.kind != TRACE}
    sessions = {span.trace: span.session for span in reversed(spans) if span.trace and span.session}
    outer = set()  # ids of calls that hold another one, of the same dialogue
    groups: dict[str, list[Span]] = defaultdict(list)
    scores: dict[object, dict[str, Any]] = defaultdict(dict)
    for number, span in enumerate(spans, start=1):
        scores[span.trace] |= span.scores
        name = sessions.get(span.trace) or span.session or span.trace
        groups[f"trace {name}" if name else f"call {span.id or number}"].append(span)
        above, seen = by_id.get((span.trace, span.parent)), {span.id}
        while above is not None and above.id not in seen:
            seen.add(above.id)
            if above.kind in (SUB_AGENT, TOOL):
                span.scope = span.scope or above.id
            if above.kind == span.kind == MODEL and span.answered:
                outer.add((above.trace, above.id))
            above = by_id.get((above.trace, above.parent))
    single: list[Span] = []  # calls of traces that have no other: each call of a dialogue may be a trace
    for name, group in groups.items():
        calls = [span for span in group if span.kind == MODEL and (span.trace, span.id) not in outer]
        tools = [span for span in group if span.kind in (TOOL, "")]  # plain spans may be tools, too
        whole = [call for call in calls if call.asked and call.answered]
        if not calls and (root := next(filter(_holds_all, reversed(group)), None)):
            messages = decoded(root.answered)["messages"]
            others = Counter({"call beside the dialogue": sum(map(_holds_all, group)) - 1})
            yield from _dialogues([Chain([root], messages)], scores, others, root.error)
            continue
        if not whole:
            yield Record(name, FieldError("", "has no call of a model with messages and an answer"))
            continue
        chains = _chains(whole, tools, True)
        if len(calls) == 1 and len(chains[0].messages) == len(calls[0].asked) + len(calls[0].answered):
            single += whole
        else:
            failed = Counter({"call without messages or an answer": len(calls) - len(whole)})
            broken = None if calls[-1] is whole[-1] else calls[-1].error or True
            yield from _dialogues(_longest(chains), scores, failed, broken)
    yield from _dialogues(_chains(single, [], False), scores, Counter(), None)


def _holds_all(span: Span) -> bool:
    """A run without a parent, as of LangGraph, that gave back all messages of its dialogue."""
    answered = decoded(span.answered) if not span.parent else None
    messages = answered.get("messages") if isinstance(answered, dict) else None
    return isinstance(messages, list) and bool(messages) and all(map(is_message, messages))


def _longest(chains: list[Chain]) -> list[Chain]:
    """Of those that begin alike in a trace, longest first."""
    kept: dict[object, Chain] = {}
    for chain in sorted(chains, key=lambda chain: -len(chain.utterances)):
        speakers = [speaker for speaker, _ in chain.utterances]
        start = chain.utterances[: speakers.index(AGENT) if AGENT in speakers else None]
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
