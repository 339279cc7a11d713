"""The multi-turn tasks of BFCL, their APIs, and how these answer the true calls.

The package ``bfcl-eval`` (Apache-2.0, Patil et al. 2025, gorilla.cs.berkeley.edu) lies in a folder of its own and is
imported from there.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from real_envs.calls import Call, parse_call

CLASSES = tuple(
    "GorillaFileSystem MathAPI MessageAPI TicketAPI TradingBot TravelAPI TwitterAPI VehicleControlAPI".split()  # noqa: SIM905
)
ERROR = "Error during execution: "
REFUSED = r'Error|\{(?:"\w+": [\w.]+, )*"error"'
_ENUM = re.compile(r"\[Enum\]:\s*(\[[^\]]*\])")
# Tools that change a state. A user is not content where one was called beside what was asked for.
CHANGING = frozenset(
    "activateParkingBrake add_contact add_to_watchlist adjustClimateControl authenticate_travel authenticate_twitter "  # noqa: SIM905
    "book_flight cancel_booking cancel_order close_ticket comment cp create_ticket delete_message echo edit_ticket "
    "fillFuelTank follow_user fund_account lockDoors logout mention message_login mkdir mv place_order post_tweet "
    "pressBrakePedal purchase_insurance register_credit_card releaseBrakePedal remove_stock_from_watchlist "
    "resolve_ticket retweet rm rmdir send_message setCruiseControl setHeadlights set_budget_limit set_navigation "
    "startEngine ticket_login ticket_logout touch trading_login trading_logout unfollow_user withdraw_funds".split()
)
NAMES = (
    "root",
    "contents",
    "stocks",
    "orders",
    "credit_card_list",
    "booking_record",
    "user_map",
)  # their keys are data


@dataclass(frozen=True)
class UserTurn:
    """One request of the user.

    Attributes:
        calls: what fulfils it, as Python; empty where nothing can be done yet.
        tools: that are there from now on.
    """

    request: str
    calls: tuple[str, ...]
    tools: tuple[str, ...] = ()


@lru_cache(maxsize=1 << 14)
def in_one_form(call: str) -> str:
    """A call as ``Call`` writes it, however it was written."""
    return str(parse_call(call))


@dataclass(frozen=True)
class BfclTask:
    """A task with its state, an original of the benchmark or a drawn one.

    Attributes:
        number: of the original; tasks of all kinds with the same number are about the same thing.
        config: initial state by class.
        hidden: tools that are not there at first.
    """

    kind: str
    number: int
    apis: tuple[str, ...]
    config: Mapping[str, Any]
    turns: tuple[UserTurn, ...]
    hidden: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> BfclTask:
        data = json.loads(text)
        turns = tuple(UserTurn(t["request"], tuple(t["calls"]), tuple(t["tools"])) for t in data.pop("turns"))
        return cls(**{**data, "apis": tuple(data["apis"]), "hidden": tuple(data["hidden"]), "turns": turns})

    def write(self) -> str:
        return json.dumps(asdict(self))

    @cached_property
    def session(self) -> str:
        """Four digits by which tasks that begin alike differ."""
        return str(int(sha256(self.write().encode()).hexdigest(), 16) % 9000 + 1000)

    def facts(self) -> tuple[str, ...]:
        """What a world model may know: later requests, what fulfils each, and the state."""
        lines = []
        for k, turn in enumerate(self.turns, 1):
            lines += [f"request {k}: {turn.request}"] if k > 1 else []
            lines += [f"tools {k}: {', '.join(turn.tools)}"] if turn.tools else []
            lines.append(f"calls {k}: {'; '.join(map(in_one_form, turn.calls)) or 'none'}")
        return (*lines, *(line for api in self.apis for line in _lines(api, self.config.get(api, {}))))


def _lines(path: str, value: Mapping[str, Any]) -> Iterator[str]:
    """A state as text: ``path: key=value, key=value``; of a folder the names in it, as ``ls`` says them, and then its
    files by their own names."""
    if value.get("type") == "directory":
        yield f"{path}: {json.dumps(list(value['contents']))[1:-1]}"
        for name, inner in value["contents"].items():
            yield from _lines(f"{path}/{name}" if inner["type"] == "directory" else name, inner)
        return
    flat = {k: v for k, v in value.items() if not isinstance(v, dict) and k != "type"}
    if flat or not value:
        yield f"{path}: {', '.join(f'{k}={v}' for k, v in flat.items())}"
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _lines(path if key == "root" else f"{path}/{key}", inner)


class Apis:
    """Instances of the APIs of a task."""

    def __init__(self, instances: Mapping[str, Any]) -> None:
        self.instances = instances

    def bound(self, call: Call) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The method that a call names and its arguments, defaults left out.

        Raises:
            ValueError: there is no such method, or the arguments do not fit it; the message says why.
        """
        method = next((getattr(api, call.name) for api in self.instances.values() if hasattr(api, call.name)), None)
        if method is None:
            raise ValueError(f"there is no tool '{call.name[:80]}'")
        expected = inspect.signature(method)
        try:
            return method, dict(expected.bind(**call.named(list(expected.parameters))).arguments)
        except TypeError as error:
            raise ValueError(f"{call.name}: {error}") from None

    def answer(self, call: Call) -> str:
        """What the API says, in the words of the benchmark's own executor; arguments that do not fit are refused."""
        try:
            method, arguments = self.bound(call)
        except ValueError as error:
            return f"Error: {error}"
        try:
            return _text(method(**copy.deepcopy(arguments)))
        except Exception as error:  # of a program of others that checks no types
            return _clean(f"{ERROR}{error}")

    def same_state(self, other: Apis) -> bool:
        """As BFCL compares states: public attributes of each instance of ``other``."""
        try:
            return all(
                getattr(self.instances[name], key, None) == value
                for name, api in other.instances.items()
                for key, value in vars(api).items()
                if not key.startswith("_")
            )
        except RecursionError:  # a directory was moved into itself
            return False

    def copy(self) -> Apis:
        known: dict[int, Any] = {}  # generators: their state is long, and copied at once
        for api in self.instances.values():
            if isinstance(generator := getattr(api, "_random", None), random.Random):
                known[id(generator)] = random.Random()
                known[id(generator)].setstate(generator.getstate())
        return Apis(copy.deepcopy(dict(self.instances), known))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _text(result: Any) -> str:
    """As the benchmark's executor writes it."""
    try:
        return _clean(json.dumps(result) if isinstance(result, dict) else str(result))
    except (TypeError, ValueError):  # a number of mpmath
        return _clean(str(result))


def refused(answer: str) -> bool:
    """Whether an answer is an error, of this world or of an API."""
    return re.match(REFUSED, answer) is not None


@dataclass
class Replay:
    """The true calls of a task as the APIs answer them: by user turn, answers and the state after them."""

    answers: list[list[str]] = field(default_factory=list)
    states: list[Apis] = field(default_factory=list)


class Package:
    """The data and the classes in the folder that ``pip install --target`` filled.

    Raises:
        ImportError: the classes cannot be imported from there.
    """

    def __init__(self, folder: Path) -> None:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        self.data = folder / "bfcl_eval" / "data"
        backend = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        self._files = backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self._classes = {
            name: getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name) for name in CLASSES
        }
        prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
        self._more_tools = str(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)
        self._replays: dict[str, Replay] = {}

    @cached_property
    def schemas(self) -> dict[str, dict[str, dict[str, Any]]]:
        """JSON schemas of arguments by class and tool."""
        rows = {name: self._rows(f"multi_turn_func_doc/{self._files[name]}") for name in CLASSES}
        return {name: {row["name"]: _json_schema(row["parameters"]) for row in rows[name]} for name in CLASSES}

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.data / name).read_text("utf-8").splitlines() if line.strip()]

    def originals(self, kind: str) -> list[BfclTask]:
        """The benchmark's tasks of a kind, in order, but for one whose true calls use a tool before it is there."""
        name = f"BFCL_v4_multi_turn_{kind}.json"
        pairs = zip(self._rows(name), self._rows(f"possible_answer/{name}"), strict=True)
        return [task for row, answer in pairs if self._can(task := self._task(kind, row, answer["ground_truth"]))]

    def _can(self, task: BfclTask) -> bool:
        return all(
            parse_call(call).name in self.tools(task, k) for k, turn in enumerate(task.turns) for call in turn.calls
        )

    def _task(self, kind: str, row: Mapping[str, Any], truth: Sequence[Sequence[str]]) -> BfclTask:
        added = {int(turn): tuple(tools) for turn, tools in row.get("missed_function", {}).items()}
        turns = [
            UserTurn(messages[0]["content"] if messages else self._more_tools, tuple(calls), added.get(k, ()))
            for k, (messages, calls) in enumerate(zip(row["question"], truth, strict=True))
        ]
        hidden = (*(name for tools in added.values() for name in tools), *row.get("excluded_function", ()))
        config = {name: value for name, value in row["initial_config"].items() if name in row["involved_classes"]}
        number = int(row["id"].rsplit("_", 1)[1])
        return BfclTask(kind, number, tuple(row["involved_classes"]), config, tuple(turns), hidden)

    def tools(self, task: BfclTask, turn: int) -> dict[str, dict[str, Any]]:
        """The schemas of what may be called in a user turn."""
        shown = {name for earlier in task.turns[: turn + 1] for name in earlier.tools}
        schemas = {name: schema for api in task.apis for name, schema in self.schemas[api].items()}
        return {name: schema for name, schema in schemas.items() if name in shown or name not in task.hidden}

    def load(self, task: BfclTask) -> Apis:
        instances = {}
        for name in task.apis:
            api = instances[name] = self._classes[name]()
            if name != "MathAPI":
                api._load_scenario(copy.deepcopy(task.config.get(name, {})), long_context=task.kind == "long_context")
        # its long states are the package's own objects, which what an episode does would change for all later ones
        return Apis(instances).copy() if task.kind == "long_context" else Apis(instances)

    def replay(self, task: BfclTask) -> Replay:
        """Known ones are kept, for tasks that are played again and again."""
        key = task.write()
        if key not in self._replays:
            while len(self._replays) >= 256:
                self._replays.pop(next(iter(self._replays)))
            apis, replay = self.load(task), Replay()
            for turn in task.turns:
                replay.answers.append([apis.answer(parse_call(call)) for call in turn.calls])
                replay.states.append(apis.copy())
            self._replays[key] = replay
        return self._replays[key]


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The benchmark's schema of a value, which has types of Python and names enums in its description."""
    kinds = {"dict": "object", "float": "number", "tuple": "array"}
    made = {**schema, "type": kinds.get(schema["type"], schema["type"])}
    if match := _ENUM.search(schema.get("description", "")):
        with contextlib.suppress(ValueError, SyntaxError):
            made["enum"] = list(ast.literal_eval(match[1]))
    if "properties" in schema:
        made["properties"] = {name: _json_schema(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        made["items"] = _json_schema(schema["items"])
    return made


def entities(task: BfclTask) -> list[str]:
    """Names and short texts of the state and the true calls."""
    texts = [text for value in task.config.values() for text in [*names_below(value), *texts_below(value)]]
    texts += [text for turn in task.turns for call in turn.calls for text in _literals(parse_call(call))]
    return list(dict.fromkeys(text for text in texts if 1 < len(text) <= 40 and "\n" not in text))


def _literals(call: Call) -> Iterator[str]:
    yield from texts_below([*call.positional, *call.arguments.values()])


def texts_below(value: Any) -> Iterator[str]:
    """Texts below a value, keys left out."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from texts_below(inner)


def names_below(value: Any, data: bool = False) -> Iterator[str]:
    """Keys of a state that are names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if data:
                yield key
            yield from names_below(inner, key in NAMES)
