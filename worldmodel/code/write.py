"""A language model writes a world as a Python function, and repairs it by the logged turns that it gets wrong.

After Agent2World and WALL-E: what is wrong of a program can be shown, and the log is its test.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from real_envs.chat_server import ChatServer
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn, same_reward
from worldmodel.code.confined import MODULES
from worldmodel.code.world_model import CodeWorldModel
from worldmodel.world_model import PredictionInvalid

_SHOWN = 40  # turns of an episode in the prompt
_BEFORE = 12  # turns before a wrong one
_LENGTH = 2000  # characters of a text
_PATIENCE = 20  # calls that may take their whole time, in a test of a version
_TASK = f"""You write a text world as a Python program. Answer with one block of Python code, whole, and nothing else.
It defines

def step(start: str, history: list[dict], action: str) -> dict

"start" is the first text of an episode. "history" has its turns so far, the oldest first, each with "action" (text),
"observation" (text), "reward" (a number) and "terminated" (whether the episode ended). Return a dict with
"observation", the exact text that the world answers "action" with, "reward" and "terminated".
The function is pure: it finds the state of the world by reading start and history, each time anew. It opens no file,
and imports nothing but {", ".join(MODULES)}. It has to hold in other tasks of the same world, too: find the laws, and
read names and places from the texts in place of listing them."""

Logged = tuple[Trajectory, int]  # a turn of an episode, by its index


class CodeLimits(Protocol):
    """The settings that ``write_world`` reads."""

    rounds: int
    episodes: int
    turns: int
    failures: int
    tokens: int
    seconds: float
    megabytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """The version that was right most often.

    Attributes:
        source: empty where no question was answered.
        exact: share of the ``n`` held-back turns of which observation, reward and end are right.
        tested: the same of the turns by whose failures it was repaired.
        version: its number, from 1.
    """

    source: str = ""
    exact: float = 0.0
    n: int = 0
    tested: float = 0.0
    version: int = 0


def write_world(
    log: Sequence[Trajectory],
    held: Sequence[Trajectory],
    server: ChatServer,
    limits: CodeLimits,
    seed: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Written:
    """Asks for a world, tests it on turns of ``log``, shows what it gets wrong, and so on, until nothing is wrong.

    The last version is repaired, and the best one on turns of ``held`` is kept; where nothing was held back, on other
    turns of the log.

    Raises:
        EngineUnavailable: this system cannot confine the code.
    """
    rng = random.Random(derive_seed("code world", seed))
    tested, judged = _sample(log, limits.turns, rng), _sample(held or log, limits.turns, rng)
    shown = rng.sample(list(log), min(limits.episodes, len(log)))
    first = question = "\n\n".join(["Episodes of the world:", *(_described(t, t.turns) for t in shown)])
    best, version = Written(), 0
    for number in range(limits.rounds + 1):
        reply = server.ask(server.question(_TASK, question, limits.tokens))
        if reply.text is None:
            progress(f"question {number + 1} was not answered: {reply.reason}")
            continue
        source, version = source_of(reply.text), version + 1
        with closing(CodeWorldModel(source, limits.seconds, limits.megabytes)) as model:
            wrong, missed = asyncio.run(_wrong(model, tested)), asyncio.run(_wrong(model, judged))
        exact, right = 1 - len(missed) / max(1, len(judged)), 1 - len(wrong) / max(1, len(tested))
        progress(f"version {version}: exact on {exact:.1%} of held-back turns, {right:.1%} of those it is repaired by")
        if not best.source or (exact, right) > (best.exact, best.tested):
            best = Written(source, exact, len(judged), right, version)
        if not wrong:
            break
        failures = [_failure(*of) for of in rng.sample(wrong, min(limits.failures, len(wrong)))]
        count = f"Your program is wrong in {len(wrong)} of {len(tested)} logged turns. Some of them:"
        again = "Repair it. Answer with the whole program."
        question = "\n\n".join([first, f"Your program:\n```python\n{source}\n```", count, *failures, again])
    return best


def source_of(text: str) -> str:
    """The last block of code of an answer, after whatever was thought; the whole answer where there is none."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text + "\n```", re.DOTALL | re.MULTILINE)
    return str(blocks[-1]) if blocks and "```" in text else text


def _sample(log: Sequence[Trajectory], most: int, rng: random.Random) -> list[Logged]:
    """Turns of the log, each situation once: the same beginnings come again and again."""
    turns = {
        (t.start, tuple(u.action for u in t.turns[: k + 1])): (t, k)
        for t in log
        for k, turn in enumerate(t.turns)
        if turn.known
    }
    return rng.sample(list(turns.values()), min(most, len(turns)))


async def _wrong(model: CodeWorldModel, turns: Sequence[Logged]) -> list[tuple[Logged, str]]:
    """The turns that the model gets wrong, each with what it answers. One that is slow everywhere is not waited for."""
    wrong, deadline = list[tuple[Logged, str]](), time.monotonic() + _PATIENCE * model.seconds
    for episode, k in turns:
        turn = episode.turns[k]
        if time.monotonic() > deadline:
            wrong.append(((episode, k), "nothing: the program was too slow on other turns"))
            continue
        try:
            got = await model.predict(episode.start, episode.turns[:k], turn.action, 0)
        except PredictionInvalid as error:
            wrong.append(((episode, k), f"nothing: {error}"))
            continue
        same = got.observation.strip() == turn.observation.strip() and got.terminated == turn.terminated
        if not (same and same_reward(got.reward, turn.reward or 0.0)):
            wrong.append(((episode, k), _answer(got.observation, got.reward, got.terminated)))
    return wrong


def _failure(logged: Logged, got: str) -> str:
    episode, k = logged
    turn = episode.turns[k]
    truth = _answer(turn.observation, turn.reward, turn.terminated)
    before = _described(episode, episode.turns[max(0, k - _BEFORE) : k])
    left_out = f"\n({k - _BEFORE} first turns are left out here)" if k > _BEFORE else ""
    return f"{before}{left_out}\n> {turn.action}\nExpected: {truth}\nYour program gave {got}"


def _described(episode: Trajectory, turns: Sequence[Turn]) -> str:
    lines = [f"> {t.action}\n{_answer(t.observation, t.reward, t.terminated)}" for t in turns[:_SHOWN]]
    return "\n".join([f"The first text: {_cut(episode.start)}", *lines])


def _answer(observation: str, reward: float | None, terminated: bool) -> str:
    earned = "unknown" if reward is None else f"{reward:g}"
    return f"{_cut(observation)}\n(reward {earned}{', the end' if terminated else ''})"


def _cut(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}... ({len(text) - _LENGTH} more characters)"
