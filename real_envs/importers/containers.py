"""Records that hold chats in another form: samples of Inspect, results of tau2-bench, trajectories of ATIF and DSPy,
trees of ChatGPT's export and of verifiers, steps of LangChain's executor, episodes of rLLM, states of AutoGen's teams,
rollouts of Atropos and NeMo Gym.

Of logs that are known and not read, ``not_read`` says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from real_envs.importers.events import objects
from real_envs.importers.records import Record, has_keys
from real_envs.importers.sessions import path_to
from real_envs.store.codec import FieldError

_VERDICTS = {"C": True, "I": False, "N": False}  # of Inspect's scorers
_CHATGPT = {  # where the parts of a content are, by its type
    **{"text": "parts", "multimodal_text": "parts", "code": "text", "execution_output": "text", "thoughts": "thoughts"},
    **{"system_error": "text", "tether_browsing_display": "result", "tether_quote": "text", "reasoning_recap": ""},
    **{"user_editable_context": "user_profile user_instructions", "model_editable_context": "model_set_context"},
}
_CALLS = "single calls of a model, of which `imagine import traces` makes dialogues"
_NOT_READ = {  # by fields of a record, or of its first message
    "messages response.choices, inputs outputs run_type, input output traceId, span_data object, object workflow_name, "
    "attributes traceId, resourceSpans": _CALLS,
    "cum_reward n_steps": "AgentLab's summaries of runs, whose steps are pickles, which could run code when read",
    "task_name agent status": "logs of CrewAI, without answers of tools",
    "input output gts": "verl's dumps of a chat template's text: log messages",
    "ts say": "lists of what Cline's window showed: import its api_conversation_history.json",
    "step_num screenshot_file": "steps of OSWorld, whose observations are pictures",
    "goal steps summary_info": "steps of AgentRewardBench, whose observations are pages apart from the answers",
    "n_resolved results": "results of Terminal-Bench, without what its agents did",
    "task_name verifier_result": "results of Harbor, which are read with the agent/trajectory.json beside them",
    "eval_set_id eval_cases": "cases of ADK, which say what an agent should do: import its sessions",
    "role thread_id": "lists of OpenAI's Assistants, newest first",
    "choices object, custom_id response": "single answers of a model, without what it was asked",
}


def not_read(record: Any) -> str:
    """What a record is one of that is known and not read; "" for all others."""
    if not isinstance(record, dict):
        return not_read(record[0]) if isinstance(record, list) and record else ""
    lists = (record.get(key) for key in ("messages", "data", "steps"))
    inner = next((given[0] for given in lists if isinstance(given, list) and given and isinstance(given[0], dict)), {})
    answer = record["response"] if isinstance(record.get("response"), dict) else {}
    fields = {*record, *inner, *(f"response.{key}" for key in answer)}
    listed = record["messages"] if isinstance(record.get("messages"), list) else []
    speakers = {str(each.get("source")) for each in listed if isinstance(each, dict) and "models_usage" in each}
    if len([name for name in speakers if "user" not in name.lower()]) > 1:
        return f"dialogues of several agents of AutoGen ({', '.join(sorted(speakers))}); they are not read as chats"
    known = ((names.split(), about) for alike, about in _NOT_READ.items() for names in alike.split(", "))
    return next((f"{about}; they are not read as chats" for names, about in known if fields.issuperset(names)), "")


def container_of(value: Any) -> str:
    """What holds the chats of a record, such as "samples of Inspect"; "" where it is none."""
    if not isinstance(value, dict):
        return ""
    lists = [key for key, inner in value.items() if isinstance(inner, list)]
    if "samples" in lists and isinstance(value.get("eval"), dict):
        return "samples of Inspect"
    if "steps" in lists and str(value.get("schema_version")).startswith("ATIF"):
        return "steps of ATIF"
    if _of_rllm(value):
        return f"{'trajectories' if 'trajectories' in lists else 'steps'} of rLLM"
    if group := _group_of(value):
        return f"{group} of several rollouts"
    asked, answered = value.get("responses_create_params"), value.get("response")
    if isinstance(asked, dict) and isinstance(answered, dict) and "input" in asked and "output" in answered:
        return "response of NeMo Gym"
    if "intermediate_steps" in lists and "input" in value:
        return "intermediate_steps of LangChain"
    if isinstance(value.get("trajectory"), dict) and "tool_name_0" in value["trajectory"]:
        return "trajectory of DSPy"
    if isinstance(value.get("agent_states"), dict):
        return "agent_states of AutoGen"
    nodes = value["mapping"].values() if isinstance(value.get("mapping"), dict) else ()
    if nodes and all(isinstance(node, dict) and {"message", "parent"} & node.keys() for node in nodes):
        return "mapping of ChatGPT's export"
    if "nodes" in lists and "task" in value:
        return "nodes of verifiers"
    return "simulations of tau2-bench" if "simulations" in lists and "messages" not in value else ""


def contained(records: Iterable[Record]) -> Iterator[Record]:
    """The chats in records; all others as they are."""
    for record in records:
        kind = container_of(record.value).partition(" ")[0]
        if not kind or not record.value[kind]:
            yield Record(record.where, FieldError(kind, "is empty: nothing was logged")) if kind else record
        elif kind in ("samples", "simulations"):
            read = _sample if kind == "samples" else _simulation
            for i, value in enumerate(record.value[kind]):
                chat = read(record.value, value) if isinstance(value, dict) else value
                yield Record(f"{record.where}, {kind}[{i}]", chat)
        else:
            try:
                for i, chat in enumerate(_READERS[kind](record.value)):
                    yield Record(f"{record.where}, dialogue {i + 1}" if i else record.where, chat)
            except FieldError as error:
                yield Record(record.where, error)


def _chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _group_of(value: Mapping[str, Any]) -> str:
    """The field with the messages of several rollouts, a list each; "" where there is none."""
    lists = ((key, value.get(key)) for key in ("messages", "completion"))
    full = ((key, given) for key, given in lists if isinstance(given, list) and any(map(_chat, given)))
    return next((key for key, given in full if all(isinstance(one, list) for one in given)), "")


def _group(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rollouts, as of Atropos and verifiers, each with its entry of the lists beside them."""
    count = len(value[_group_of(value)])
    # a list of messages is the prompt of all
    several = ((key, given) for key, given in value.items() if isinstance(given, list) and not _chat(given))
    lists = {key for key, given in several if len(given) == count}
    for i in range(count):
        yield {key: given[i] if key in lists else given for key, given in value.items() if key != "id" or count == 1}


def _nemo_gym(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    asked, answered = value["responses_create_params"], value["response"]
    about = {"input": asked["input"], "instructions": asked.get("instructions"), "output": answered["output"]}
    about |= {key: answered.get(key) for key in ("model", "status", "error", "incomplete_details")}
    yield {**value, "responses_create_params": None, "response": None} | about


def _executor(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of LangChain's AgentExecutor: pairs of a call, with what the model wrote, and what its tool gave."""
    made: list[Any] = []
    for pair in value["intermediate_steps"]:
        step, seen = pair if isinstance(pair, list) and len(pair) == 2 else (pair, None)
        inner = step if isinstance(step, dict) else {}
        inner = inner["kwargs"] if isinstance(inner.get("kwargs"), dict) else inner
        thought = re.split("Action:|Invoking:", str(inner.get("log") or ""))[0].replace("Thought:", "").strip()
        call = {"name": inner.get("tool"), "arguments": inner.get("tool_input")}
        made.append({"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [call]})
        made += [] if seen is None else [{"role": "tool", "content": seen}]
    asked, output = value["input"], value.get("output")
    cut = str(output).startswith("Agent stopped due to")  # which the executor says, and no agent
    answer = [{"role": "assistant", "content": output}] if output is not None and not cut else []
    value = {**value, "stop_condition": "max_iterations"} if cut else value
    before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    yield {**value, "intermediate_steps": None, "input": None, "output": None} | {"messages": [*before, *made, *answer]}


def _dspy(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of DSPy's ReAct: numbered thoughts, calls and answers; the task is in the texts of its inputs."""
    steps, made = value["trajectory"], []
    for i in range(len(steps)):
        if (name := steps.get(f"tool_name_{i}")) is None:
            break
        call = {"name": name, "arguments": steps.get(f"tool_args_{i}")}
        made.append({"role": "assistant", "content": None, "reasoning_content": steps.get(f"thought_{i}")})
        made[-1] |= {"tool_calls": [call], "ends": name == "finish"}
        made.append({"role": "tool", "content": steps.get(f"observation_{i}")})
    named = (value.get(key) for key in ("question", "query", "input", "task"))
    asked = next((text for text in named if isinstance(text, str)), None)
    if asked is None:
        raise FieldError("question", "is missing: nothing says what the task is")
    yield {**value, "trajectory": None, "messages": [{"role": "user", "content": asked}, *made]}


def with_result(records: Iterable[Record], path: Path) -> Iterator[Record]:
    """The trajectory in a file of Harbor with the task, rewards and breakdown that the trial's ``result.json`` has."""
    file = path.parent.parent / "result.json"
    known = path.name == "trajectory.json" and has_keys(file, "task_name", "verifier_result")
    result = json.loads(file.read_bytes()) if known else {}
    verdict = result["verifier_result"] if isinstance(result.get("verifier_result"), dict) else {}
    rewards = list(verdict["rewards"].values()) if isinstance(verdict.get("rewards"), dict) else []
    about = {"task_id": result.get("task_name"), "exception_info": result.get("exception_info")}
    about |= {"reward": rewards[0]} if len(rewards) == 1 else {"rewards": rewards or None}
    for record in records:
        beside = known and container_of(record.value) == "steps of ATIF"
        yield Record(record.where, {**about, **record.value}) if beside else record


def _trajectories(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """That of ATIF, and those of its sub-agents, with the models that acted."""
    agent = value["agent"] if isinstance(value.get("agent"), dict) else {}
    yield {**value, "agent": agent.get("model_name") or agent.get("name"), "subagent_trajectories": None}
    inside = value.get("subagent_trajectories")
    for inner in inside if isinstance(inside, list) else ():
        if container_of(inner):
            yield from _trajectories(inner)


def _team(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a team of AutoGen: what each of its agents read and said. Raises ``FieldError``: it holds no such dialogue."""
    states = {name: one["agent_state"] for name, one in value["agent_states"].items() if _holds(one, "agent_state")}
    contexts = {name: state["llm_context"] for name, state in states.items() if _holds(state, "llm_context")}
    if not contexts:
        raise FieldError("agent_states", "have no 'llm_context': no agent says what it read")
    for name, context in contexts.items():
        yield {"messages": context.get("messages"), "agent": name}


def _holds(value: Any, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(key), dict)


def _of_rllm(value: Mapping[str, Any]) -> bool:
    """Whether it is an episode of rLLM, or one of its trajectories: steps with the dialogue so far."""
    inner = value.get("trajectories", [value])
    steps = inner[0].get("steps") if isinstance(inner, list) and inner and isinstance(inner[0], dict) else None
    return isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "chat_completions" in steps[0]


def _rllm(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A dialogue a trajectory. Raises ``FieldError``: a step does not go on from the one before it."""
    trajectories, name = value.get("trajectories", [value]), value.get("id")
    about = {"task_id": str(name).partition(":")[0] if name else None, "success": value.get("is_correct")}
    about["termination_reason"] = value.get("termination_reason")
    for number, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, dict):
            raise FieldError(f"trajectories[{number}]", f"is {trajectory!r:.40}, not a trajectory")
        steps, messages = trajectory.get("steps"), list[Any]()
        for i, step in enumerate(steps if isinstance(steps, list) else ()):
            chat, at = step.get("chat_completions") if isinstance(step, dict) else None, f"steps[{i}].chat_completions"
            # earlier thoughts may be cut
            if not isinstance(chat, list) or list(map(_said, chat[: len(messages)])) != list(map(_said, messages)):
                raise FieldError(at, "is not the dialogue of the step before with more messages")
            messages += chat[len(messages) :]
            if messages and isinstance(messages[-1], dict) and trajectory.get("reward") is None:
                messages[-1] = {**messages[-1], "reward": step.get("reward")}
        given = {"messages": messages, "agent": trajectory.get("name"), "trajectories": None, "steps": None}
        given["id"] = f"{name}/{number}" if name and len(trajectories) > 1 else name
        yield {**value, **trajectory} | about | given


def _said(message: Any) -> Any:
    """Who speaks, and what the world says: of the agent's messages nothing is compared."""
    given = message if isinstance(message, dict) else {}
    return given.get("role"), None if given.get("role") == "assistant" else given.get("content")


def _conversation(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of ChatGPT's export: a tree, of which the user left one path."""
    nodes = {str(key): node for key, node in value["mapping"].items() if isinstance(node, dict)}
    said = {key: node["message"] for key, node in nodes.items() if isinstance(node.get("message"), dict)}
    above = {key: str(node.get("parent")) for key, node in nodes.items()}
    leaves = [str(value["current_node"])] if value.get("current_node") else nodes.keys() - set(above.values())
    path = max((path_to(above, leaf) for leaf in sorted(leaves)), key=len, default=[])
    given = [said.pop(key) for key in path if key in said]
    about = (message["metadata"] for message in given if isinstance(message.get("metadata"), dict))
    model = next(filter(None, (one.get("model_slug") for one in about)), None)
    chat = {"messages": list(map(_of_chatgpt, given)), "agent": model, "title": value.get("title")}
    yield chat | {"messages_of_other_branches": len(said) or None}


def _of_chatgpt(message: Mapping[str, Any]) -> dict[str, Any]:
    author, content = (message[key] if isinstance(message.get(key), dict) else {} for key in ("author", "content"))
    role, to, kind = author.get("role"), message.get("recipient") or "all", str(content.get("content_type", "text"))
    if kind not in _CHATGPT:
        return {"role": role, "content": [{"type": kind}]}  # unknown, and refused
    given = [content.get(key) for key in _CHATGPT[kind].split()]
    parts = [part for one in given for part in (one if isinstance(one, list) else [one]) if part]
    keys = ("text", "content", "summary")
    texts = [next(filter(None, map(part.get, keys)), None) if isinstance(part, dict) else str(part) for part in parts]
    text = "\n".join(one for one in texts if isinstance(one, str))
    if kind == "thoughts":
        return {"role": role, "content": None, "reasoning_content": text}
    if role == "assistant" and to != "all":
        return {"role": role, "content": None, "tool_calls": [{"name": to, "arguments": text}]}
    pictures = [{"type": "image"} for one in texts if not isinstance(one, str)]
    return {"role": "system" if kind.endswith("context") else role, "content": [text, *pictures]}


def _branches(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a graph of verifiers: its longest path."""
    nodes = {i: node for i, node in enumerate(value["nodes"]) if isinstance(node, dict)}
    above = {i: node["parent"] if isinstance(node.get("parent"), int) else None for i, node in nodes.items()}
    path = max((path_to(above, leaf) for leaf in nodes.keys() - set(above.values())), key=len, default=[])
    task, agent = (value[key] if isinstance(value.get(key), dict) else {} for key in ("task", "agent"))
    rewards = value["rewards"].values() if isinstance(value.get("rewards"), dict) else []
    scores = [one if isinstance(one, dict) else {"score": one} for one in rewards if one is not None]
    parts = [(one["score"], one.get("weight", 1.0)) for one in scores if one.get("score") is not None]
    plain = all(isinstance(number, int | float) and abs(number) < 1e12 for pair in parts for number in pair)
    about = {key: value.get(key) for key in ("id", "stop_condition", "is_truncated", "is_completed", "reward", "error")}
    about |= {"reward": sum(score * weight for score, weight in parts)} if parts and plain else {}
    broke = value.get("ok") is not True and isinstance(value.get("errors"), list)  # else those of earlier attempts
    about |= {"error": value["errors"][-1]} if broke and value["errors"] else {}
    calls = [call for call in objects(value.get("calls")) if not call.get("error")] or [nodes[at] for at in path]
    about["finish_reason"] = calls[-1].get("finish_reason") if calls else None
    about |= {"task_id": task.get("key") or task.get("hash"), "agent": agent.get("name")}
    others = len(nodes) - len(path)
    yield {"messages": [nodes[at].get("message") for at in path], "messages_of_other_branches": others or None} | about


def _simulation(file: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """With the policy that its agent was shown, the model that acted, and what its user was told."""
    info = file["info"] if isinstance(file.get("info"), dict) else {}
    world, agent = info.get("environment_info"), info.get("agent_info")
    policy = world.get("policy") if isinstance(world, dict) else None
    tasks = file["tasks"] if isinstance(file.get("tasks"), list) else []
    own = (t for t in tasks if isinstance(t, dict) and t.get("id") == value.get("task_id"))
    scenario = next(own, {}).get("user_scenario")
    model = agent.get("llm") if isinstance(agent, dict) else None
    return {"system": policy, "agent": model, "user_scenario": scenario, **value}


def _sample(file: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    scores, texts, limit, output = (
        sample[key] if isinstance(sample.get(key), dict) else {} for key in ("scores", "attachments", "limit", "output")
    )
    choice = next(iter(objects(output.get("choices"))), {})
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
        "finish_reason": choice.get("stop_reason"),
        "error": sample.get("error"),
    }


def _attached(value: Any, texts: Mapping[str, Any]) -> Any:
    """With long texts, which Inspect keeps apart, in their places."""
    if isinstance(value, str) and value.startswith("attachment://"):
        return texts.get(value.removeprefix("attachment://"), value)
    if isinstance(value, list):
        return [_attached(inner, texts) for inner in value]
    return {key: _attached(inner, texts) for key, inner in value.items()} if isinstance(value, dict) else value


def _steps(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _rllm(value) if _of_rllm(value) else _trajectories(value)


_READERS = {
    "steps": _steps,
    "trajectories": _rllm,
    "agent_states": _team,
    "mapping": _conversation,
    "nodes": _branches,
    **dict.fromkeys(("messages", "completion"), _group),
}
_READERS |= {"response": _nemo_gym, "intermediate_steps": _executor, "trajectory": _dspy}
