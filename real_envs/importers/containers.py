"""Files that hold chats in another form: sessions of Claude Code, samples of Inspect and results of tau2-bench.

Of logs that are known and not read, ``not_read`` says what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from real_envs.importers.records import Record
from real_envs.store.codec import FieldError

_VERDICTS = {"C": True, "I": False, "N": False}  # of Inspect's scorers
_CALLS = "single calls of a model, of which `imagine import traces` makes dialogues"
_NOT_READ = {  # by fields of a record, or of its first message
    "messages response.choices, inputs outputs run_type, input output traceId, span_data object, object workflow_name, "
    "attributes traceId, resourceSpans": _CALLS,
    "task nodes stop_condition": "graphs of messages of verifiers: log its messages",
    "step_number model_output, task task_images": "steps of smolagents: log the agent's messages",
    "sessionId projectHash": "sessions of Gemini's CLI",
    "cum_reward n_steps": "AgentLab's summaries of runs, whose steps are pickles",
    "mapping current_node": "ChatGPT's exports, whose conversations are trees",
    "task_name agent status": "logs of CrewAI, without answers of tools",
    "input output gts": "verl's dumps of a chat template's text: log messages",
    "source models_usage": "dialogues of several agents of AutoGen",
    "role thread_id": "lists of OpenAI's Assistants, newest first",
    "step_id source": "trajectories in Harbor's ATIF",
}


def not_read(record: Any) -> str:
    """What a record is one of that is known and not read; "" for all others."""
    if not isinstance(record, dict):
        return not_read(record[0]) if isinstance(record, list) and record else ""
    lists = (record.get(key) for key in ("messages", "data", "steps"))
    inner = next((given[0] for given in lists if isinstance(given, list) and given and isinstance(given[0], dict)), {})
    answer = record["response"] if isinstance(record.get("response"), dict) else {}
    fields = {*record, *inner, *(f"response.{key}" for key in answer)}
    known = ((names.split(), about) for alike, about in _NOT_READ.items() for names in alike.split(", "))
    return next((f"{about}; they are not read as chats" for names, about in known if fields.issuperset(names)), "")


def container_of(value: Any) -> str:
    """What holds the chats of a record, such as "samples of Inspect"; "" where it is none."""
    if isinstance(value, dict) and isinstance(value.get("samples"), list) and isinstance(value.get("eval"), dict):
        return "samples of Inspect"
    simulated = isinstance(value, dict) and isinstance(value.get("simulations"), list) and "messages" not in value
    return "simulations of tau2-bench" if simulated else ""


def contained(records: Iterable[Record]) -> Iterator[Record]:
    """The chats in records; all others as they are."""
    for record in records:
        kind = container_of(record.value).partition(" ")[0]
        if not kind or not record.value[kind]:
            yield Record(record.where, FieldError(kind, "is empty: nothing was logged")) if kind else record
            continue
        read = _sample if kind == "samples" else _simulation
        for i, value in enumerate(record.value[kind]):
            chat = read(record.value, value) if isinstance(value, dict) else value
            yield Record(f"{record.where}, {kind}[{i}]", chat)


def _simulation(file: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """With the policy that its agent was shown, and the model that acted."""
    info = file["info"] if isinstance(file.get("info"), dict) else {}
    world, agent = info.get("environment_info"), info.get("agent_info")
    policy = world.get("policy") if isinstance(world, dict) else None
    return {"system": policy, "agent": agent.get("llm") if isinstance(agent, dict) else None, **value}


def _sample(file: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    scores, texts, limit = (
        sample[key] if isinstance(sample.get(key), dict) else {} for key in ("scores", "attachments", "limit")
    )
    given = {f"score.{name}": score.get("value") for name, score in scores.items() if isinstance(score, dict)}
    values = {name: _VERDICTS.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    only = next(iter(values.values())) if len(values) == 1 else None
    kind = "time" if limit.get("type") == "working" else limit.get("type")
    return values | {
        "messages": _attached(sample.get("messages"), texts),
        "task_id": f"{file['eval'].get('task')}/{sample.get('id')}",
        "agent": file["eval"].get("model"),
        "success": only if isinstance(only, bool) else None,
        "reward": only if isinstance(only, int | float) and not isinstance(only, bool) else None,
        "stop_condition": f"{kind}_limit" if kind else None,
        "error": sample.get("error"),
    }


def _attached(value: Any, texts: Mapping[str, Any]) -> Any:
    """With long texts, which Inspect keeps apart, in their places."""
    if isinstance(value, str) and value.startswith("attachment://"):
        return texts.get(value.removeprefix("attachment://"), value)
    if isinstance(value, list):
        return [_attached(inner, texts) for inner in value]
    return {key: _attached(inner, texts) for key, inner in value.items()} if isinstance(value, dict) else value


def sessions(records: Iterable[Record]) -> Iterator[Record]:
    """The sessions of Claude Code in a file, and their side chains apart, without what a rewind took back."""
    chains: dict[tuple[str, str], dict[object, Any]] = {}
    rewound: Counter[tuple[str, str]] = Counter()
    roots: dict[object, str] = {}
    session = ""
    for record in records:
        line = record.value
        if not isinstance(line, dict):
            yield record if isinstance(line, FieldError) else Record(record.where, FieldError("", "is no object"))
            continue
        uuid, parent = (line[key] if isinstance(line.get(key), str) else None for key in ("uuid", "parentUuid"))
        session, side = str(line.get("sessionId") or session), ""
        if line.get("isSidechain") is True:
            side = roots[uuid] = str(line.get("agentId") or roots.get(parent, uuid))
        chain = chains.setdefault((session, side), {})
        if uuid is not None and uuid in chain:  # copied when a session was resumed
            continue
        linked = parent in chain or (parent is None and any(each.get("parentUuid") for each in chain.values()))
        since = list(chain).index(parent) + 1 if parent in chain else 0
        for key in list(chain)[since:] if linked and _prompt(line) else ():
            rewound[session, side] += isinstance(chain.pop(key).get("message"), dict)
        chain[uuid or len(chain)] = line
    loose = chains.pop(("", ""), {}) if len(chains) > 1 else {}  # titles, of no session
    for (name, side), chain in chains.items():
        messages = [line["message"] for line in chain.values() if isinstance(line.get("message"), dict)]
        model = next(
            (message["model"] for message in messages if message.get("model") not in (None, "<synthetic>")), None
        )
        value = {"messages": [*loose.values(), *chain.values()], "agent": model, "session": name}
        yield Record(f"session {name} {side}".strip(), value | {"rewound_messages": rewound[name, side] or None})
        loose = {}


def _prompt(line: Mapping[str, Any]) -> bool:
    """Whether a user wrote it: no answer of a tool, and no note of the program."""
    content = line["message"].get("content") if isinstance(line.get("message"), dict) else None
    notes = line.get("type") != "user" or line.get("isMeta") or line.get("isCompactSummary")
    answers = isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "tool_result" for p in content)
    return bool(content) and not notes and not answers
