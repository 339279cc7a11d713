"""Any MCP server as a real environment, by the client of the package ``mcp``: actions are calls of its tools.

``pip install 'imagination[mcp]'``, then ``env=mcp env.options.command='python server.py'`` (stdio) or
``env.options.url=http://127.0.0.1:8000/mcp`` (streamable HTTP). An episode has a server process, or a session, of its
own: what a server keeps elsewhere, such as in a database, is not reset.

Tasks are lines of a file, ``{"id": "notes-1", "text": "Write a note 'milk'."}``, with ``"split": "heldout"`` where it
must be there. ``"check": {"call": "list_notes()", "matches": "milk"}`` says when it is solved: at ``done()``, what that
call answers matches a regular expression; without a call, what the agent does, ``done(answer='42')``. Without a check
there is no reward.

What a tool says of a wrong call is an observation. No answer in time, a server that dies and an answer that the
protocol does not allow are failures of the episode.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, ClassVar

from real_envs.calls import Call, Tool, parse_call, signature, write_tools
from real_envs.chat_server import is_local
from real_envs.env import EnvFailure, Task
from real_envs.errors import UserError
from real_envs.process_guard import MARK
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.world import FILE
from real_envs.worlds.generated import Splits, TaskRequest
from real_envs.worlds.servers.client import (
    FAREWELL,
    ServerReply,
    ServerWorld,
    check_url,
    commands_of,
    crashed,
    timed_out,
)

_DESCRIBED = 80  # characters of a tool's description in the start text
_PAGES = 100  # of a list of tools
_DONE = "Ends the task, with its answer where one is asked for."
_QUOTED = re.compile(r"""["'“]([^"'“”\n]{1,60})["'”]""")


@dataclass(frozen=True, slots=True)
class McpSettings:
    """Which server, its tasks, and how its tools are shown."""

    command: str = ""  #: starts a server that speaks over stdio, ``python server.py``
    url: str = ""  #: of a server that speaks streamable HTTP, ``http://host:port/mcp``
    token: str = ""  #: environment variable with the token that a server at ``url`` wants
    variables: str = ""  #: environment variables that ``command`` may read, ``A_KEY+B_KEY``; others are kept from it
    tasks: str = ""  #: file of tasks, a JSON object a line
    done: str = "done"  #: the call that ends an episode
    commands: str = ""  #: what scripted agents choose from besides calls that fit the schemas, ``f(x=1)|g()``
    timeout: float = 30.0  #: seconds for an answer

    def __post_init__(self) -> None:
        if self.url:
            check_url(self.url, ("http", "https"))
        if (self.url and self.command) or "@" in self.url.partition("//")[2].partition("/")[0]:
            raise ValueError("set command or url, one of them, and no password in it: token names a variable")
        if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in (*self.names, *filter(None, [self.token]))):
            raise ValueError("token and variables are names of environment variables, not their values")
        if not self.done.isidentifier() or not self.timeout > 0:
            raise ValueError("done is a name, and timeout more than 0")

    @property
    def names(self) -> list[str]:
        return self.variables.split("+") if self.variables else []


class McpSession:
    """A server process, or a session at a server, that lasts for an episode (a ``ServerSession``)."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._stack = ExitStack()
        self._portal: Any = None
        self._client: Any = None
        self._http: Any = None
        self._errors: Any = None  # a file, into which a server process writes
        self._tools: dict[str, Tool] = {}
        self._text = ""  # of the start
        self._check: dict[str, str] = {}
        self._reward: float | None = None  # of a step

    def start(self, spec: Mapping[str, str]) -> ServerReply:
        tools = self.connect()
        self._check = json.loads(spec["check"])
        self._reward = 0.0 if self._check else None
        lines = [signature(tool.name, tool.schema) + self._about(tool) for tool in tools]
        self._text = "\n".join([spec["text"], "Tools, called as name(argument=value):", *lines])
        return self._reply(self._text, seen="")

    def act(self, action: str) -> ServerReply:
        try:
            call = parse_call(action)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name[:80]!r}")
            arguments = call.named(_parameters(self._tools[call.name]))
        except ValueError as error:
            return self._reply(f"Invalid call: {error}", seen="")
        if call.name == self._settings.done:
            return ServerReply("Done.", self._judged(arguments), True)
        text = self._called(call.name, arguments)
        return self._reply(text, seen=text)

    def close(self) -> None:
        if self._http is not None:
            self._http.timeout = FAREWELL
        with suppress(Exception):  # whatever went wrong on the way out was told before, or no longer matters
            self._stack.close()
        self._stack, self._client, self._http = ExitStack(), None, None

    def connect(self) -> list[Tool]:
        """The tools of a fresh process or session, and ``done``. Raises ``EnvFailure``, ``UserError``."""
        from anyio.from_thread import start_blocking_portal

        self.close()
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._errors = self._stack.enter_context(errors)
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(self._connection()))
        except (UserError, EnvFailure):
            raise
        except Exception as error:
            raise self._failure("the handshake", error) from None
        done = {"type": "object", "properties": {"answer": {"type": "string"}}}
        tools = [*self._ask("tools/list", self._list), Tool(self._settings.done, _DONE, done)]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise UserError(f"the server has two tools of a name, or {self._settings.done!r}: set env.options.done")
        return tools

    @asynccontextmanager
    async def _connection(self) -> Any:
        import httpx2
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self._settings
        token = os.environ.get(settings.token, "")
        if settings.token and not token:
            raise UserError(f"the environment variable {settings.token} is empty (env.options.token)")
        if settings.url:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with httpx2.AsyncClient(
                headers=headers, timeout=settings.timeout, trust_env=not is_local(settings.url)
            ) as http:
                self._http = http
                transport: Any = streamable_http_client(settings.url, http_client=http)
                async with Client(transport, mode="legacy", read_timeout_seconds=settings.timeout) as client:
                    yield client
        elif words := shlex.split(settings.command):
            given = {name: os.environ[name] for name in (MARK, *settings.names) if name in os.environ}
            server = StdioServerParameters(command=words[0], args=words[1:], env=given)
            transport = stdio_client(server, errlog=self._errors)
            async with Client(transport, mode="legacy", read_timeout_seconds=settings.timeout) as client:
                yield client
        else:
            raise UserError("env=mcp wants env.options.command='python server.py' or env.options.url=http://...")

    async def _list(self) -> list[Tool]:
        tools, cursor = [], None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise crashed(f"the server lists more than {_PAGES} pages of tools")

    def _called(self, name: str, arguments: Mapping[str, object]) -> str:
        """What the tool answers. Raises ``EnvFailure``."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        async def ask() -> Any:
            try:
                return await self._client.call_tool(name, dict(arguments))
            except MCPError as error:
                if error.code == INVALID_PARAMS:  # the server understood, and says what is wrong with the call
                    return f"Error: {error.message}"
                raise

        result = self._ask(name, ask)
        return result if isinstance(result, str) else _text_of(result)

    def _judged(self, arguments: Mapping[str, object]) -> float | None:
        """What ``done`` earns."""
        if not self._check:
            return None
        seen = str(arguments.get("answer", ""))
        if "call" in self._check:
            call = parse_call(self._check["call"])
            if call.name not in self._tools:
                raise crashed(f"the check calls {call.name!r}, and the server has no such tool")
            seen = self._called(call.name, call.named(_parameters(self._tools[call.name])))
        return float(re.search(self._check["matches"], seen) is not None)

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        if self._client is None:
            raise crashed("there is no connection to the server: start first")
        try:
            return self._portal.call(question)
        except EnvFailure:
            raise
        except Exception as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: BaseException) -> EnvFailure:
        """The client's exception, which its task groups wrap, as a failure of the episode."""
        from httpx2 import TimeoutException
        from mcp import MCPError
        from mcp_types import REQUEST_TIMEOUT

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        where = self._settings.url or self._settings.command
        late = isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT
        if late or isinstance(error, TimeoutError | TimeoutException):
            return timed_out(f"{what} at {where} took longer than {self._settings.timeout:g} s")
        self._errors.seek(0)
        written = self._errors.read().rstrip().rpartition("\n")[2]
        return crashed(f"{what} at {where}: {error or type(error).__name__}{f' ({written})' if written else ''}")

    def _about(self, tool: Tool) -> str:
        line = " ".join(tool.description.split())[:_DESCRIBED]
        return f": {line}" if line else ""

    def _reply(self, text: str, seen: str) -> ServerReply:
        plausible = plausible_calls(self._tools.values(), f"{self._text}\n{seen}")
        commands = dict.fromkeys([*plausible, *commands_of(self._settings.commands)])
        return ServerReply(text, self._reward, False, tuple(commands))


def _parameters(tool: Tool) -> list[str]:
    properties = tool.schema.get("properties")
    return list(properties) if isinstance(properties, dict) else []


def _text_of(result: Any) -> str:
    """A tool's texts; parts that are none are counted and told."""
    texts: list[str] = []
    others: Counter[str] = Counter()
    for part in result.content:
        text = part.text if part.type == "text" else getattr(getattr(part, "resource", None), "text", None)
        if text is None:
            others[part.type] += 1
        else:
            texts.append(text)
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    if others:
        texts.append(f"[no text: {', '.join(f'{count} {kind}' for kind, count in sorted(others.items()))}]")
    text = "\n".join(texts).encode("utf-8", "replace").decode() or "[an empty answer]"
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


def plausible_calls(tools: Any, seen: str, most: int = 6) -> Iterator[str]:
    """For scripted agents: up to ``most`` calls of each tool, with texts in quotes and numbers that were read last."""
    texts = list(dict.fromkeys(_QUOTED.findall(seen)))[:4] or ["text"]
    numbers = list(dict.fromkeys(map(int, re.findall(r"\b\d{1,9}\b", seen))))[:4] or [1]

    def values(schema: object) -> Sequence[object]:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
            return schema["enum"]
        if kind == "array":
            return [[value] for value in values(schema.get("items") if isinstance(schema, dict) else None)]
        known: dict[object, Sequence[object]] = {"integer": numbers, "number": numbers, "boolean": [True, False]}
        return [{}] if kind == "object" else known.get(kind, texts)

    for tool in tools:
        properties, required = tool.schema.get("properties"), tool.schema.get("required")
        needed = [key for key in (required if isinstance(required, list) else ()) if key in (properties or {})]
        for chosen in islice(product(*(values(properties[key]) for key in needed)), most):
            yield str(Call(tool.name, dict(zip(needed, chosen, strict=True))))


class Mcp(ServerWorld):
    """``env=mcp`` (a ``World``)."""

    name: ClassVar[str] = "mcp"
    settings: ClassVar[type[McpSettings]] = McpSettings
    invalid: ClassVar[str] = r"\AInvalid call:"
    session: ClassVar[type[McpSession]] = McpSession
    address: ClassVar[tuple[str, ...]] = ("url", "command")
    advice: ClassVar[str] = "see env.options.command and env.options.url"
    language: ClassVar[CommandGrammar] = CommandGrammar.of("2 {a}() | 2 {a}({b}) | 1 {a}", look="help")

    def __init__(self) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ImportError("No module named 'mcp'; run `pip install 'imagination[mcp]'`")

    def check(self, session: McpSession, settings: McpSettings, folder: Path) -> None:
        write_tools(folder, session.connect())
        drawn = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else {"made_by": {}}
        made, file = drawn["made_by"], settings.tasks
        if made.get("settings", {}).get("tasks") != file or not Path(file).exists():
            return
        if deal_tasks(file, made["counts"], made["seed"]) != drawn["splits"]:
            raise UserError(f"env.options.tasks={file} has changed since this run dealt its tasks: use another run=")

    def draw_from(self, session: McpSession, settings: McpSettings, request: TaskRequest) -> Splits:
        return deal_tasks(settings.tasks, request.counts, request.seed)

    def task(self, drawn: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
        return Task(drawn["id"], {"text": drawn["text"], "check": json.dumps(drawn.get("check", {}))})


def deal_tasks(file: str, counts: Mapping[str, int], seed: int) -> dict[str, list[dict[str, Any]]]:
    """The tasks of each split, in random order. Raises ``UserError``: there are too few, or one is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n") if file else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"env.options.tasks={file} cannot be read: {error}") from None
    tasks: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}  # ids by what an episode begins with
    for place, line in enumerate(lines, 1):
        if line.strip():
            try:
                task = _task_of(line)
                if task["id"] in tasks:
                    raise ValueError(f"the id {task['id']!r} is there before")
                if (other := texts.setdefault(task["text"], task["id"])) != task["id"]:
                    raise ValueError(f"the text is that of {other!r}: they would be one task, perhaps of both splits")
                if task.get("split", "train") not in [*counts]:
                    raise ValueError(f"split is {task['split']!r}, not {' or '.join(counts)}")
            except (ValueError, re.error) as error:
                raise UserError(f"env.options.tasks={file} line {place}: {error}") from None
            tasks[task["id"]] = task
    left = list(tasks.values())
    random.Random(derive_seed("mcp", seed)).shuffle(left)
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in counts.items():
        named = [task for task in left if task.get("split") == split]
        splits[split] = (named + [task for task in left if "split" not in task])[:count]
        left = [task for task in left if task not in splits[split]]
        if len(splits[split]) < count:
            raise UserError(f"env.options.tasks={file} has {len(splits[split])} tasks for games.{split}={count}")
    return splits


def _task_of(line: str) -> dict[str, Any]:
    """Raises ``ValueError``: it is no task."""
    task = json.loads(line)
    if not isinstance(task, dict) or not all(isinstance(task.get(key), str) and task[key] for key in ("id", "text")):
        raise ValueError('a task is {"id": ..., "text": ...}, both texts')
    check = task.get("check", {})
    if not isinstance(check, dict) or not all(isinstance(value, str) for value in check.values()):
        raise ValueError("check is an object of texts")
    if check and not {"matches"} <= check.keys() <= {"matches", "call"}:
        raise ValueError('check is {"matches": ...}, and "call" beside it where a call is what is matched')
    re.compile(check.get("matches", ""))
    if "call" in check:
        parse_call(check["call"])
    return task
