"""Any Gymnasium environment that speaks text, or that a wrapper makes speak, as a real environment.

``env=gymnasium env.options.id=BabyAI-GoToLocal-v0`` plays BabyAI, whose wrapper is ``BabyAIText`` here. For others
``env.options.wrapper=module:name`` names a callable that takes the environment and returns a ``TextEnv``; without one,
observations must be text, and actions text or numbers. ``pip install 'imagination[gymnasium]'``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from real_envs.env import StepResult, Task
from real_envs.errors import UserError
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import Game, GeneratedWorld, TaskRequest, draw_distinct, hints

UNKNOWN = "Unknown action."
INVALID = r"Unknown action\."
# What is said to an environment whose own commands are few and have no names in them; most of it is not understood.
LANGUAGE = CommandGrammar.of(
    "2 go to {a} | 2 pick up {a} | 1 open {a} | 1 drop {a} | 1 turn around | 1 go back | 1 wait"
)
_TRIES = 30  # seeds drawn for each task, before the environment is said to have no more that differ
_FOLDS = 5
_WRAPPERS = {
    "BabyAI-": "real_envs.worlds.gymnasium_text:BabyAIText",
    "MiniGrid-": "real_envs.worlds.gymnasium_text:BabyAIText",
}


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one action did. ``reward`` totals 1 where a task is solved; ``truncated`` is the environment's own limit."""

    text: str
    reward: float
    terminated: bool
    truncated: bool


class TextEnv(Protocol):
    """A Gymnasium environment that speaks text."""

    def reset(self, seed: int) -> str: ...

    def step(self, action: str) -> Stepped | None:
        """``None``: there is no such action, and nothing has happened."""
        ...

    def hidden(self) -> Mapping[str, object]:
        """What scripted agents read, see ``real_envs.scripted_agents``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GymnasiumSettings:
    """Which environment."""

    id: str = "BabyAI-GoToLocal-v0"  #: as ``gymnasium.make`` takes it
    #: ``module:name`` of what makes it speak text; empty takes that of BabyAI and MiniGrid for theirs, and for others
    #: texts as they are
    wrapper: str = ""


class Plain:
    """Observations are text, actions text or numbers."""

    def __init__(self, env: Any) -> None:
        import gymnasium

        self._env, space = env, env.action_space
        if not isinstance(env.observation_space, gymnasium.spaces.Text):
            raise UserError(
                f"{env.spec.id} observes {env.observation_space}, not text: name what makes text of it, "
                "env.options.wrapper=module:name"
            )
        self._numbers: list[str] = []
        if isinstance(space, gymnasium.spaces.Discrete):
            self._numbers = [str(k) for k in range(int(space.start), int(space.start) + int(space.n))]
        elif not isinstance(space, gymnasium.spaces.Text):
            raise UserError(f"{env.spec.id} acts by {space}, neither text nor numbers: name env.options.wrapper")

    def reset(self, seed: int) -> str:
        return str(self._env.reset(seed=seed)[0])

    def step(self, action: str) -> Stepped | None:
        if self._numbers and action not in self._numbers:
            return None
        text, reward, terminated, truncated, _ = self._env.step(int(action) if self._numbers else action)
        return Stepped(str(text), float(reward), bool(terminated), bool(truncated))

    def hidden(self) -> Mapping[str, object]:
        return hints(self._numbers or ["look"])

    def close(self) -> None:
        self._env.close()


def make(settings: GymnasiumSettings) -> TextEnv:
    """
    Raises:
        ImportError: Gymnasium or the package of the environment is not there.
        UserError: there is no such environment or wrapper, or it speaks no text.
    """
    known = next((target for start, target in _WRAPPERS.items() if settings.id.startswith(start)), "")
    try:
        import gymnasium

        if known:
            importlib.import_module("minigrid")  # registers its environments
    except ImportError as error:
        raise ImportError(f"{error}; run `pip install 'imagination[gymnasium]'`") from error
    try:
        env = gymnasium.make(settings.id)
    except gymnasium.error.Error as error:
        raise UserError(f"env.options.id={settings.id}: {error}") from error
    target = settings.wrapper or known
    if not target:
        return Plain(env)
    module, _, name = target.partition(":")
    try:
        wrapped: TextEnv = getattr(importlib.import_module(module), name)(env)
    except (ImportError, AttributeError) as error:
        raise UserError(f"env.options.wrapper={target}: {error}; it wants module:name") from error
    return wrapped


class GymnasiumGame(Game):
    """The instance that ``task.spec["seed"]`` makes."""

    def __init__(self, settings: GymnasiumSettings, privileged: bool = False) -> None:
        super().__init__(privileged)
        self._settings = settings

    def _start(self, task: Task) -> str:
        self._simulator = self._simulator or make(self._settings)
        text: str = self._simulator.reset(int(task.spec["seed"]))
        return text

    def _act(self, action: str) -> StepResult:
        done = self._simulator.step(" ".join(action.split())) or Stepped(UNKNOWN, 0.0, False, False)
        truncated = done.truncated and not done.terminated
        return StepResult(self._observation(done.text), done.reward, done.terminated, truncated)

    def _hints(self) -> dict[str, object]:
        return dict(self._simulator.hidden())


class GymnasiumText(GeneratedWorld):
    """``env=gymnasium`` (a ``World``)."""

    name: ClassVar[str] = "gymnasium"
    settings: ClassVar[type[GymnasiumSettings]] = GymnasiumSettings
    package: ClassVar[str] = "minigrid"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE

    def draw(self, settings: GymnasiumSettings, request: TaskRequest) -> dict[str, list[int]]:
        counts = request.counts
        rng = random.Random(derive_seed(f"gymnasium/{settings.id}", request.seed))
        folded = settings.id.startswith(tuple(_WRAPPERS))  # worlds with starts enough
        with contextlib.closing(make(settings)) as env:
            return draw_distinct(
                request,
                lambda split, count: (rng.randrange(2**31) for _ in range(_tries(split) * count)),
                env.reset,
                lambda split, found: (
                    f"{settings.id} has too few different starts for games.{split}={counts[split]}: {found} found "
                    f"among {_tries(split) * counts[split]} seeds"
                ),
                lambda split, start: not folded or (split == "heldout") == is_heldout(start),
            )

    def task(self, drawn: int, settings: Mapping[str, Any]) -> Task:
        return Task(f"{settings['id']}-s{drawn}", {"seed": str(drawn)})

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[GymnasiumGame]:
        return partial(GymnasiumGame, GymnasiumSettings(**settings), privileged)


def is_heldout(start: str) -> bool:
    """Whether a task of BabyAI or MiniGrid that starts so is of the fold by which policies are judged: one in five.

    They have no folds of their own, and another seed can make the same task.
    """
    return derive_seed(f"BabyAI fold/{start}") % _FOLDS == 0


def _tries(split: str) -> int:
    return _TRIES * (_FOLDS if split == "heldout" else 1)


ACTIONS = {"turn left": 0, "turn right": 1, "go forward": 2, "pick up": 3, "drop": 4, "toggle": 5}


class BabyAIText:
    """One environment of MiniGrid, as ``gymnasium.make`` returns it."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._bot: Any = None
        self._done: Any = None  # the last action, for the bot

    def reset(self, seed: int) -> str:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of every layout that it rejects
            self._env.reset(seed=seed)
        self._bot, self._done = None, None
        return f"Your task is to {self._env.unwrapped.mission}.\n{self._view()}"

    def step(self, action: str) -> Stepped | None:
        actions = self._env.unwrapped.actions
        if action not in ACTIONS:
            self._done = actions.done  # to the bot: neither what was done before, once more, nor what it suggested
            return Stepped(self._view(), 0.0, False, False) if action == "look" else None
        _, reward, terminated, truncated, _ = self._env.step(ACTIONS[action])
        self._done = actions(ACTIONS[action])
        # MiniGrid takes off up to nine tenths for the time it took; a solved task is worth 1 here
        return Stepped(self._view(), float(reward > 0), bool(terminated), bool(truncated))

    def hidden(self) -> Mapping[str, object]:
        """The commands, the bot's next one, and what is in view. The bot is asked at every step once it was asked."""
        plan: list[str] = []
        if self._bot is None:
            from minigrid.utils.baby_ai_bot import BabyAIBot

            with contextlib.suppress(Exception):  # it knows BabyAI's missions and no others of MiniGrid
                self._bot = BabyAIBot(self._env.unwrapped)
        if self._bot is not None:
            with contextlib.suppress(Exception):  # it asserts what an odd step before has broken
                number = int(self._bot.replan(self._done))
                plan = [name for name, action in ACTIONS.items() if action == number]
        named = sorted({f"{thing.color} {thing.type}" for thing, _, _ in self._seen()})
        return hints([*ACTIONS, "look"], plan, self._hands(), named)

    def close(self) -> None:
        self._env.close()

    def _seen(self) -> list[tuple[Any, int, int]]:
        """Things in view, nearest first, with cells ahead and to the right."""
        grid, visible = self._env.unwrapped.gen_obs_grid()
        middle, last = grid.width // 2, grid.height - 1
        things = []
        for i in range(grid.width):
            for j in range(grid.height):
                thing = grid.get(i, j)
                if thing and visible[i, j] and (i, j) != (middle, last) and thing.type not in ("wall", "floor"):
                    things.append((thing, last - j, i - middle))
        return sorted(things, key=lambda seen: (seen[1] + abs(seen[2]), seen[1], seen[2]))

    def _view(self) -> str:
        lines = [f"{_name(thing)}: {_where(ahead, right)}" for thing, ahead, right in self._seen()]
        grid, visible = self._env.unwrapped.gen_obs_grid()
        middle, last = grid.width // 2, grid.height - 1
        ahead = ((k, grid.get(middle, last - k)) for k in range(1, grid.height) if visible[middle, last - k])
        free = next((k for k, thing in ahead if thing is not None and thing.type == "wall"), None)
        lines.append(f"a wall: {free} ahead" if free else "no wall ahead")
        return "\n".join([*lines, self._hands()])

    def _hands(self) -> str:
        carried = self._env.unwrapped.carrying
        return f"You carry {_name(carried)}." if carried else "You carry nothing."


def _name(thing: Any) -> str:
    state = ("locked " if thing.is_locked else "open " if thing.is_open else "closed ") if thing.type == "door" else ""
    words = f"{state}{thing.color} {thing.type}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _where(ahead: int, right: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(parts)
