"""Tool APIs: the multi-turn tasks of the Berkeley Function Calling Leaderboard, played with its own stateful APIs.

A file system, trading, travel, messages, tweets, tickets, a car and arithmetic. The text of a reset lists the tools and
gives the user's first request. An action is a call as text (``real_envs.calls``), answered by the API; any
other text, or ``done()``, ends the user's turn and brings the next request. As in BFCL, a turn is fulfilled where the
state of each API equals that after the true calls, and their answers are among those that were given. A fulfilled turn
pays its part of 1; one that is not ends the episode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.calls import Call, parse_call, signature
from real_envs.env import StepResult, Task
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.bfcl_declared import FAILED, SOLVED, call_of, is_answered, refusal, signatures, user_answer
from real_envs.worlds.bfcl_drawn import HELD_OUT, WORDS, DrawnTasks
from real_envs.worlds.bfcl_tasks import (
    CLASSES,
    REFUSED,
    BfclTask,
    Package,
    entities,
    in_one_form,
    refused,
)
from real_envs.worlds.generated import (
    Game,
    GeneratedWorld,
    TaskRequest,
    draw_distinct,
    hints,
    package_folder,
    share_of_split,
)

VERSION = "2026.3.23"
DONE = "done()"
_LIST = "ls(a=True)"
_FOLDS = 5
_ROUNDS = 120  # states drawn of each original, before there are said to be no more that differ
_CALLS = 16  # random ones that are tried for scripted agents
_HEAD = "Session {session}. Answer with one call of a tool, or with done() when the request is fulfilled.\n{tools}\n"

LANGUAGE = CommandGrammar.of(
    "2 cd(folder='{a}') | 2 cat(file_name='{a}') | 2 mv(source='{a}', destination='{b}') | 1 cp(source='{a}', "
    "destination='{b}') | 1 touch(file_name='{a}') | 1 mkdir(dir_name='{a}') | 1 grep(file_name='{a}') | "
    "1 get_stock_info(symbol='{a}') | 1 add_to_watchlist(stock='{a}') | 1 get_order_details(order_id='{a}') | "
    "1 book_flight(card_id='{a}') | 1 get_credit_card_balance(card_id='{a}') | 1 send_message(receiver_id='{a}', "
    "message='{b}') | 1 post_tweet(content='{a}') | 1 get_user_id(user='{a}') | 1 create_ticket(title='{a}') | "
    "1 get_ticket(ticket_id='{a}') | 1 set_navigation(destination='{a}') | 1 startEngine(mode='{a}') | 1 mean('{a}') | "
    "1 open(name='{a}') | 1 search(query='{a}') | 1 delete(name='{a}') | 1 rm('{a}', '{b}') | 0.5 look()",
    directions=(),
    look="help()",
)


@dataclass(frozen=True, slots=True)
class BfclSettings:
    """Where the package is, which tasks are played, and which of them judge."""

    package: str = ""  #: the folder that holds ``bfcl_eval``; empty takes ``$BFCL_HOME``, or ``bfcl`` in the venv
    #: miss_func lacks tools at first, miss_param what requests need; long_context has long answers and states
    kind: Literal["base", "miss_func", "miss_param", "long_context"] = "base"
    apis: str = ""  #: only tasks of these classes, such as ``GorillaFileSystem+MathAPI``; empty takes all
    heldout_api: str = ""  #: a class of every held-out task and no other; empty holds out what ``heldout`` says
    #: originals: a fifth of them and all that is drawn of it; states: drawn of any original, with names of their own
    heldout: Literal["originals", "states"] = "originals"

    def __post_init__(self) -> None:
        if self.heldout_api and self.heldout == "states":
            raise ValueError("heldout_api holds out a class, so heldout=states cannot be")
        for name in [*self.apis.split("+"), self.heldout_api]:
            if name and name not in CLASSES:
                raise ValueError(f"there is no class '{name}'; there are {', '.join(CLASSES)}")

    @property
    def folder(self) -> Path:
        """Raises ``UserError`` where the package is not there."""
        return package_folder(self.package, "BFCL_HOME", "bfcl", "bfcl_eval", install_arguments)


def install_arguments(folder: Path) -> str:
    """For pip. Without its dependencies, whose versions contradict ours; the APIs need none of them."""
    return f"--no-deps --target {folder} bfcl-eval=={VERSION}"


@lru_cache(maxsize=1)
def _package(folder: Path) -> Package:
    return Package(folder)


def is_heldout(number: int) -> bool:
    """Whether the original task of that number is of the fold that judges policies: one in five, for any seed."""
    return derive_seed("BFCL fold", number) % _FOLDS == 0


class BfclGame(Game):
    """A task that ``spec["task"]`` holds as JSON.

    ``policy_commands`` are what is left of the true calls; a ``cd`` aside is taken back first. In every other task they
    list a folder before they use what is in it, so that a log shows both ways. ``admissible_commands`` are random calls
    that the APIs do not refuse here, most of which change nothing, and ``done()``.
    """

    def __init__(self, folder: Path, privileged: bool = False) -> None:
        super().__init__(privileged)
        self._package = _package(folder)

    def _start(self, task: Task) -> str:
        self._task = BfclTask.read(task.spec["task"])
        self._replay = self._package.replay(self._task)
        self._names = entities(self._task)
        self._apis = self._package.load(self._task)
        self._turn, self._steps, self._paid = 0, 0, 0.0
        self._answers: list[str] = []
        self._careful = derive_seed(f"BFCL careful/{self._task.session}", 0) % 2 == 0
        self._listed: Any = None  # the folder that was listed last
        self._begin_turn()
        tools = "\n".join(signature(name, schema) for name, schema in self._tools.items())
        return _HEAD.format(session=self._task.session, tools=tools) + self._request()

    def _begin_turn(self) -> None:
        self._tools = self._package.tools(self._task, self._turn)
        self._signatures = signatures("\n".join(signature(*tool) for tool in self._tools.items()))
        self._plan = [parse_call(call) for call in self._task.turns[self._turn].calls]
        self._called = False

    def _request(self) -> str:
        turn = self._task.turns[self._turn]
        added = [signature(name, self._tools[name]) for name in turn.tools]
        return "\n".join([*added, f"User: {turn.request}"])

    def _act(self, action: str) -> StepResult:
        self._steps += 1
        try:
            call = call_of(action, self._signatures)
        except ValueError as error:
            return self._answered(f"Error: {error}")
        if call is None:
            return self._end_turn()
        before = self._directory()
        answer = self._apis.answer(call)
        self._called = True
        self._answers.append(answer)
        if call.name == "ls":
            self._listed = before
        self._follow(call, answer, before)
        return self._answered(answer)

    def _answered(self, text: str) -> StepResult:
        return StepResult(self._observation(text), 0.0, False, False)

    def _end_turn(self) -> StepResult:
        last = self._turn == len(self._task.turns) - 1
        if not self.fulfilled():
            self._plan = []
            return StepResult(self._observation(FAILED), 0.0, True, False)
        reward = 1.0 - self._paid if last else round(1.0 / len(self._task.turns), 2)
        self._paid += reward
        if last:
            return StepResult(self._observation(SOLVED), round(reward, 6), True, False)
        self._turn += 1
        self._begin_turn()
        return StepResult(self._observation(self._request()), round(reward, 6), False, False)

    def fulfilled(self) -> bool:
        """Whether the user's turn could end here, as BFCL judges it: a turn without true calls always may."""
        wanted = self._replay.answers[self._turn]
        left = list(self._answers)
        for answer in wanted:
            if answer not in left:
                return False
            left.remove(answer)
        return not wanted or (self._called and self._apis.same_state(self._replay.states[self._turn]))

    def _directory(self) -> Any:
        """Where the file system is; calls there depend on it, and no comparison of states looks at it."""
        files = self._apis.instances.get("GorillaFileSystem")
        return files._current_dir if files is not None else None

    def _follow(self, call: Call, answer: str, before: Any) -> None:
        """What is left of the plan: a call of it was made, a ``cd`` aside is taken back, anything else is ignored."""
        if refused(answer):
            return
        _, arguments = self._apis.bound(call)
        for k, planned in enumerate(self._plan):
            if planned.name == call.name and self._apis.bound(planned)[1] == arguments:
                del self._plan[k]
                return
        if self._directory() is not before:
            up = arguments["folder"] == ".."
            self._plan.insert(0, Call("cd", {"folder": before.name if up else ".."}))

    def _hints(self) -> dict[str, object]:
        later = [call for turn in self._task.turns[self._turn + 1 :] for call in turn.calls]
        listing = [_LIST] if self._careful and self._uses_unlisted() else []
        plan = [*listing, *map(str, self._plan), DONE, *map(in_one_form, later)]
        return hints([*self._valid(), DONE], plan, entities=self._names)

    def _uses_unlisted(self) -> bool:
        """Whether the next true call names something in the current folder, which was not listed and will not be."""
        folder, planned = self._directory(), [call.name for call in self._plan]
        if not planned or folder is None or folder is self._listed or "ls" not in self._tools or "ls" in planned:
            return False
        return any(isinstance(v, str) and v in folder.contents for v in self._apis.bound(self._plan[0])[1].values())

    def _valid(self) -> list[str]:
        """Random calls that are not refused here, at most two of which change a state."""
        rng = random.Random(derive_seed(f"BFCL calls/{self._task.session}", self._steps))
        known = dict.fromkeys(map(str, self._plan[:1]))
        changing = 0
        for _ in range(_CALLS):
            call = self._random_call(rng)
            trial = self._apis.copy()
            if refused(trial.answer(call)):
                continue
            if not self._apis.same_state(trial):
                changing += 1
                if changing > 2:
                    continue
            known[str(call)] = None
        return list(known)

    def _random_call(self, rng: random.Random) -> Call:
        tool = rng.choice(list(self._tools))
        parameters, required = self._tools[tool]["properties"], self._tools[tool]["required"]
        chosen = [name for name in parameters if name in required or rng.random() < 0.2]
        return Call(tool, {name: self._random_value(parameters[name], rng) for name in chosen})

    def _random_value(self, schema: Mapping[str, Any], rng: random.Random) -> Any:
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema["type"]
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("integer", "number"):
            number = rng.choice((0, 1, 2, 3, 5, 10, 20, 50, 100, 500))
            return float(number) if kind == "number" else number
        if kind == "array":
            return [self._random_value(schema.get("items", {"type": "string"}), rng) for _ in range(rng.randint(1, 2))]
        return {} if kind == "object" else rng.choice(self._names or ["name"])


class Bfcl(GeneratedWorld):
    """``env=bfcl`` (a ``World``)."""

    name: ClassVar[str] = "bfcl"
    settings: ClassVar[type[BfclSettings]] = BfclSettings
    package: ClassVar[str] = "bfcl-eval"
    invalid: ClassVar[str] = REFUSED
    language: ClassVar[CommandGrammar] = LANGUAGE
    refusal = staticmethod(refusal)
    user_answer = staticmethod(user_answer)
    is_answered = staticmethod(is_answered)

    def draw(self, settings: BfclSettings, request: TaskRequest) -> dict[str, list[dict[str, str]]]:
        """Originals first, in random order, then states that are drawn of them. No original is in two splits, but where
        states are held out.

        Raises:
            UserError: a split has no original, or not so many different states of them.
        """
        counts, seed = request.counts, request.seed
        package = _package(settings.folder)
        originals = package.originals(settings.kind)
        if settings.apis:
            originals = [task for task in originals if set(task.apis) <= set(settings.apis.split("+"))]
        states = settings.heldout == "states"
        by_fold = {held: [t for t in originals if states or _judges(t, settings) is held] for held in (True, False)}
        game, drawn_tasks = BfclGame(settings.folder), DrawnTasks(package)

        def candidates(split: str, count: int) -> Iterator[dict[str, str]]:
            order = share_of_split(by_fold[split == "heldout"], split, counts)
            random.Random(derive_seed(f"bfcl/{settings.kind}/{split}", seed)).shuffle(order)
            judged = states and split == "heldout"
            words = WORDS if not states else HELD_OUT if judged else drawn_tasks.of_training
            for number in range(judged, _ROUNDS):
                for task in order:
                    draw_seed = derive_seed(f"bfcl/{task.number}" + "/heldout" * judged, seed, number)
                    drawn = drawn_tasks.draw(task, draw_seed, words) if number else task
                    if drawn is not None:
                        name = f"bfcl-{task.kind}-{task.number}" + "-heldout" * judged
                        name += f"-s{seed}-{number}" if number else ""
                        yield {"id": name, "task": drawn.write()}

        def too_few(split: str, number: int) -> str:
            return f"BFCL has {number} different tasks for '{split}', not games.{split}={counts[split]}"

        def start_of(drawn: dict[str, str]) -> str:
            return game.reset(self.task(drawn, {})).text

        return draw_distinct(request, candidates, start_of, too_few)

    def task(self, drawn: Mapping[str, str], settings: Mapping[str, Any]) -> Task:
        return Task(drawn["id"], {"task": drawn["task"]}, world_facts=BfclTask.read(drawn["task"]).facts())

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[BfclGame]:
        return partial(BfclGame, self.settings(**settings).folder, privileged)


def _judges(task: BfclTask, settings: BfclSettings) -> bool | None:
    """Whether a task is held out; ``None``: it neither trains nor judges."""
    if not settings.heldout_api:
        return is_heldout(task.number)
    if settings.heldout_api in task.apis:
        return True
    return None if is_heldout(task.number) else False
