"""Whatever a record holds, it is an episode or is refused by its field. If not, one bad line ends a whole import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.importers.containers import contained
from real_envs.importers.drafts import Reading, finish
from real_envs.importers.formats import FORMATS, Imported, find_format, read
from real_envs.importers.records import Record
from real_envs.importers.sessions import gemini_session, sessions, stream
from real_envs.store.codec import FieldError, decode, encode

KEYS = """
messages traj prompt completion role content tool_calls function name arguments task_id reward success id
agent turn_history actions observations rewards valid_action thoughts summary max_reward query environment
conversations from value loss item_id trace problem plans turns action observation terminated start stop
model_output history result pages metadata step_number index instruction passed x trajectory thought response query
type text input output thinking summary tool_use_id requestor reasoning_content source data error info
parts functionCall functionResponse args toolInvocation state payload sessionId uuid parentUuid isSidechain message
step_number model_output observations tool_calls plan task_images step_id steps schema_version toolCalls resultDisplay
models_usage mapping current_node nodes parent author content_type recipient rewards $rewindTo $set projectHash
kwargs lc additional_kwargs invalid_tool_calls samples simulations eval scores attachments limit sender kind
llm_message system_prompt tool_call tool_name part_kind message_type tool_return data toolRequests item event part
blocks block_type contents toolCall toolResult status session_id channel parentId delta contextItems callId transcript
intermediate_steps tool_name_0 responses_create_params tool_call_result origin executableCode approve episodes
Role Items Label Text $type pluginName items tool_messages message_id record_type instructions timestamp exception_info
chat_completions trajectories is_correct agent_state llm_context loss_mask is_copied_context num_turns
TimeLimit.truncated
"""
SPEAKERS = ["user", "assistant", "tool", "system", "human", "gpt", "function_call", "observation"]
KINDS = ["text", "tool_use", "tool_result", "thinking", "reasoning", "document", "image", "ai", "response_item"]
KINDS += ["gemini", "info", "TextMessage", "ToolCallExecutionEvent", "multimodal_text", "thoughts", "ATIF-v1.5"]
KINDS += ["item.completed", "tool.execution_complete", "context.append_loop_event", "tool/result", "session", "result"]
KINDS += ["FunctionCallContent", "functionCall", "usage", "UserMessage", "FunctionExecutionResultMessage", "summary"]
KINDS += [
    "thread_rolled_back",
    "turn_aborted",
    "event_msg",
    "error",
    "ActionEvent",
    "request",
    "tool_call_message",
    "toolRequest",
    "tool",
    "tool_call",
    "_checkpoint",
    "json",
]
KINDS += ["server_tool_use", "mcp_tool_result", "tool-f", "dynamic-tool", "web_search_call", "run", "output-available"]
WORDS = st.sampled_from([*SPEAKERS, *KINDS, "a\n> b", "terminated", "expert", "", "\ud800", "<think>", '{"name": "x"}'])
PLAIN = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.integers() | WORDS
NAMES = st.sampled_from(KEYS.split())
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=25
)
ROW = st.dictionaries(NAMES, JSON, max_size=6)


def record(needed: dict[str, st.SearchStrategy[Any]], *more: str) -> st.SearchStrategy[Any]:
    """A record that has the fields by which its format is known, and, perhaps, others."""
    return st.fixed_dictionaries(needed, optional=dict.fromkeys(more, JSON))


SAID = st.lists(
    record({"role": WORDS, "content": JSON, "from": WORDS, "value": JSON}, "tool_calls", "type") | JSON, max_size=5
)
ARRAYS = st.fixed_dictionaries({name: st.lists(PLAIN, max_size=3) for name in ("actions", "observations", "rewards")})
RECORDS: dict[str, st.SearchStrategy[Any]] = {
    "openai": record({"messages": SAID}, "reward", "success", "id", "task_id", "agent") | ROW,
    "agentgym": record({"conversations": SAID}, "reward", "item_id", "agent") | ROW,
    "intercode": record({"turn_history": ARRAYS | JSON}, "summary", "query") | ROW,
    "commands": record({"trace": WORDS}, "problem", "reward", "success") | ROW,
    "jsonl": record({"turns": st.lists(ROW, max_size=3), "task_id": JSON}, "start", "stop") | ROW,
    "swe-agent": record({"trajectory": st.lists(ROW, max_size=3) | JSON}, "history", "info") | ROW,
    "huggingface": ROW | ARRAYS,
    "minari": st.fixed_dictionaries(
        {
            "series": st.fixed_dictionaries(
                {"observations": st.lists(WORDS, min_size=2, max_size=2), "truncations": st.just([False])},
                optional={f"{name}s": st.lists(PLAIN, max_size=2) for name in ("action", "reward", "termination")},
            ),
            "spaces": st.just({"observation": {"type": "Text"}, "action": {"type": "Discrete", "n": 2}}),
            "metadata": ROW,
        }
    ),
    "browser-use": st.fixed_dictionaries(
        {"result": ROW | JSON, "history": record({"history": st.lists(ROW, max_size=3)}) | JSON, "pages": st.just({})}
    ),
}


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_is_an_episode_or_is_refused(name: str) -> None:
    found = FORMATS[name]
    readings = (
        Reading(names={"action": ["a", "b"]}),
        Reading(mapping={"action": "actions", "observation": "observations", "reward": "rewards"}),
    )

    @settings(max_examples=150)
    @given(RECORDS[name], st.sampled_from(readings))
    def check(record: dict[str, Any], reading: Reading) -> None:
        try:
            episode, _ = finish(found.draft(record, reading), name="file/")
        except FieldError:
            return
        assert decode(encode(episode)) == episode
        assert episode.id

    check()


LINE = record(
    {"type": WORDS}, "sessionId", "uuid", "parentUuid", "isSidechain", "message", "payload", "role", "content"
) | record({"type": WORDS}, "data", "item", "event", "part", "session_id", "id", "parentId", "kind", "source", "delta")
LINE |= record({"type": WORDS, "payload": record({"type": WORDS}, "num_turns", "role", "content", "message")})
LINE |= record({"Role": record({"Label": WORDS}), "Items": st.lists(ROW | JSON, max_size=2)}) | record(
    {"items": SAID, "role": WORDS}
)
STEPS = record(
    {"steps": st.lists(record({"chat_completions": SAID | JSON}, "reward") | JSON, max_size=3)}, "name", "reward"
)
TREES = (
    record({"schema_version": st.just("ATIF-v1"), "steps": st.lists(ROW | JSON, max_size=3)}, "agent", "observation")
    | record({"mapping": st.dictionaries(WORDS, ROW | JSON, max_size=3), "current_node": WORDS}, "title")
    | record({"mapping": st.dictionaries(WORDS, record({"message": ROW | JSON}, "parent"), min_size=1, max_size=3)})
    | record({"messages": st.lists(SAID, min_size=1, max_size=2)}, "scores", "id")
    | record({"trajectories": st.lists(STEPS | JSON, max_size=3)}, "id", "is_correct")
    | STEPS
    | record({"agent_states": st.dictionaries(WORDS, record({"agent_state": record({"llm_context": ROW})}) | JSON)})
    | record({"input": JSON, "intermediate_steps": st.lists(JSON, max_size=2)}, "output")
    | record({"trajectory": record({"tool_name_0": JSON}, "thoughts", "observation"), "question": JSON})
    | record({"responses_create_params": record({"input": JSON}), "response": record({"output": JSON})}, "reward")
    | record({"task": JSON, "nodes": st.lists(record({"parent": PLAIN, "message": ROW}) | JSON)}, "rewards", "agent")
)
RUN = record({"eval": ROW, "samples": st.lists(ROW | record({"messages": SAID}, "scores", "limit") | JSON, max_size=3)})


@settings(max_examples=150)
@given(st.lists(LINE, max_size=5), st.lists(TREES | RUN | ROW | JSON, max_size=3))
def test_lines_and_logs_of_other_programs_become_records(lines: list[Any], runs: list[Any]) -> None:
    records = [Record("line", line) for line in lines]
    chats = [*sessions(records), *gemini_session(records), *contained(Record("record", run) for run in runs)]
    chats.append(Record("the file", stream(lines)))
    for chat in chats:
        if not isinstance(chat.value, FieldError):
            try:
                finish(FORMATS["openai"].draft(chat.value, Reading()), name="file/")
            except FieldError:
                continue


SPAN_KEYS = """
id trace_id traceId parent_run_id parentSpanId run_type span_data attributes inputs outputs input output type object
start_time startTime name error scores feedback_stats observations child_runs resourceSpans spans data events response
choices generations message messages content tool_calls key value stringValue arrayValue values session_id context
resourceLogs scopeLogs logRecords eventName body spanId events kvlistValue system request_body response_body
finish_reason
message.role message.content event.name gen_ai.output.messages
gen_ai.input.messages gen_ai.prompt.0.content gen_ai.prompt.x llm.input_messages.0.message ai.response.toolCalls role
"""
SPAN_WORDS = st.sampled_from(
    [
        "llm",
        "tool",
        "agent",
        "GENERATION",
        "gen_ai.choice",
        "gen_ai.user.message",
        "chat",
        "look(",
        "assistant",
        "tool",
        "t",
        "1",
        "[]",
    ]
)
SPAN_JSON = st.recursive(
    PLAIN | SPAN_WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(SPAN_KEYS.split()), inner, max_size=6),
    max_leaves=30,
)
CALLS = record({"run_type": SPAN_WORDS, "inputs": SPAN_JSON, "outputs": SPAN_JSON}, "trace_id", "id", "parent_run_id")
LOG = record({"eventName": SPAN_WORDS, "traceId": SPAN_JSON, "body": SPAN_JSON}, "spanId", "attributes")
LOGS = record(
    {"resourceLogs": st.lists(record({"scopeLogs": st.lists(record({"logRecords": st.lists(LOG | SPAN_JSON)}))}))}
)


@settings(max_examples=150)
@given(st.lists(CALLS | LOGS | record({"traceId": WORDS, "attributes": SPAN_JSON}) | SPAN_JSON, max_size=5))
def test_spans_become_episodes_or_are_refused(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    path: Path = tmp_path_factory.mktemp("spans") / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for item in read(path, FORMATS["traces"], Reading()):
        assert "rest of the file" not in str(item)
        if isinstance(item, Imported):
            assert decode(encode(item.episode)) == item.episode


@settings(max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=4))
def test_ids_of_a_file_differ_and_are_the_same_again(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    turn = {"action": "a", "observation": "o"}
    path: Path = tmp_path_factory.mktemp("own") / "log.jsonl"
    path.write_text("\n".join(json.dumps({"task_id": "t", "start": str(row), "turns": [turn]}) for row in rows))
    found, _ = find_format("auto", path)
    first, again = ([i.episode.id for i in read(path, found, Reading()) if isinstance(i, Imported)] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(rows)
