"""MiniGrid and BabyAI as text: what stands where in view, and six commands (a ``TextEnv`` of ``gymnasium_text``).

A grid seen from within, as in the text versions of BabyAI (Chevalier-Boisvert et al. 2019, arXiv 1810.08272; Carta et
al. 2023, arXiv 2302.02662): ``a red key: 2 ahead, 1 left``. BabyAI's own bot is the plan.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from real_envs.gymnasium_text import Stepped

ACTIONS = {"turn left": 0, "turn right": 1, "go forward": 2, "pick up": 3, "drop": 4, "toggle": 5}


class BabyAIText:
    """One environment of MiniGrid.

    Args:
        env: as ``gymnasium.make`` returns it.
    """

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
        if action == "look":
            return Stepped(self._view(), 0.0, False, False)
        if action not in ACTIONS:
            return None
        _, reward, terminated, truncated, _ = self._env.step(ACTIONS[action])
        if self._bot is not None:
            self._done = self._env.unwrapped.actions(ACTIONS[action])
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
        return {
            "admissible_commands": [*ACTIONS, "look"],
            "policy_commands": plan,
            "inventory": self._hands(),
            "entities": named,
        }

    def close(self) -> None:
        self._env.close()

    def _seen(self) -> list[tuple[Any, int, int]]:
        """Things in view, nearest first, with cells ahead and to the right."""
        grid, visible = self._env.unwrapped.gen_obs_grid()
        middle, last = grid.width // 2, grid.height - 1
        found = []
        for i in range(grid.width):
            for j in range(grid.height):
                thing = grid.get(i, j)
                if thing and visible[i, j] and (i, j) != (middle, last) and thing.type not in ("wall", "floor"):
                    found.append((thing, last - j, i - middle))
        return sorted(found, key=lambda seen: (seen[1] + abs(seen[2]), seen[1], seen[2]))

    def _view(self) -> str:
        lines = [f"{_name(thing)}: {_where(ahead, right)}" for thing, ahead, right in self._seen()]
        grid, visible = self._env.unwrapped.gen_obs_grid()
        middle, last = grid.width // 2, grid.height - 1
        walls = (k for k in range(1, grid.height) if visible[middle, last - k] and _is_wall(grid.get(middle, last - k)))
        free = next(walls, None)
        lines.append(f"a wall: {free} ahead" if free else "no wall ahead")
        return "\n".join([*lines, self._hands()])

    def _hands(self) -> str:
        carried = self._env.unwrapped.carrying
        return f"You carry {_name(carried)}." if carried else "You carry nothing."


def _is_wall(thing: Any) -> bool:
    return thing is not None and thing.type == "wall"


def _name(thing: Any) -> str:
    state = ("locked " if thing.is_locked else "open " if thing.is_open else "closed ") if thing.type == "door" else ""
    words = f"{state}{thing.color} {thing.type}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _where(ahead: int, right: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(parts)
