"""A world model that writes what changes: an edit and a status line. Code applies the edit and rejects invalid ones.

Simulators are right where nothing changes and fail where much does (EnvSimBench); what is copied by code cannot be
copied wrongly.

What an edit refers to was chosen on the TextWorld log of the demo (27,330 training turns, 11.5 target tokens a turn as
whole text). The last observation alone is the wrong reference there: answers are short and share nothing with one
another, while walking back into a room repeats most of a long text from several turns before; edits of the last
observation alone save 3 % of the tokens. So an edit may also name a line that it has seen in the episode, such as the
title of a room, and is then an edit of the text from that line on. All in all that saves 20 %: the 16 % of turns that
are edits take 4.7 tokens instead of 20.8. A line rather than the number of an observation, because a model writes the
title of the room in any case, and would have to count turns for the number.

What an edit has made stands in the prompt in full, as a note before the next action, so that the model sees the text
whose lines the next edit counts, and only has to know what has changed since. Pages that are too long to be repeated
can do without (``worldmodel.edited_in_full=false``); what they hold must then be pieced together from all edits before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from policy.lm.engine import Engine
from policy.lm.render import ChatFormat, status_line
from real_envs.trajectory import Trajectory, Turn
from worldmodel.edits import EditInvalid, apply, diff
from worldmodel.form import Form, WholeText
from worldmodel.text import TextWorldModel
from worldmodel.world_model import InvalidReason, PredictionInvalid


@lru_cache(maxsize=1 << 16)
def _edit(observations: tuple[str, ...]) -> str:
    """The edit that makes the last of these observations out of those before it."""
    *earlier, before, after = observations
    return diff(before, after, earlier)


class Edits:
    """The form of ``DeltaWorldModel``: an edit of an earlier observation, in the prompt as in the answer.

    Args:
        in_full: the text that an edit has made follows it in the prompt; nobody is trained on it.
    """

    reasoning = 0

    def __init__(self, in_full: bool = True) -> None:
        self.in_full = in_full

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        """See ``Form``. The edits are canonical, also where the model wrote another one for the same observation."""
        seen = [start]
        written = []
        for turn in turns:
            seen.append(turn.observation)
            written.append(_edit(tuple(seen)) + status_line(turn.reward, turn.terminated))
        return written

    def notes(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """See ``Form``. Where nothing has changed, the text stands there already."""
        if not self.in_full:
            return []
        edits = [answer.rpartition("\n")[0] for answer in self.answers(start, history)]
        made = [
            f"{turn.observation}\n> " if edit.startswith("=") and edit != "=" else ""
            for turn, edit in zip(history, edits, strict=True)
        ]
        return ["", *made]

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        """See ``Form``.

        Raises:
            PredictionInvalid: no status line, or an edit that cannot be applied; told apart by its reason.
        """
        edit, reward, terminated = WholeText().read(text, start, history)
        *earlier, before = [start, *(turn.observation for turn in history)]
        try:
            return apply(before, edit, earlier), reward, terminated
        except EditInvalid as error:
            raise PredictionInvalid(f"the edit was rejected: {error}", InvalidReason.EDIT) from error

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return []

    def excluding(self, episodes: Sequence[Trajectory]) -> Form:
        return self


class DeltaWorldModel(TextWorldModel):
    """A ``TextWorldModel`` in the form of edits; see the module.

    A rejected edit raises ``PredictionInvalid`` with the reason ``InvalidReason.EDIT``, is counted in ``rejected``, and
    is never an observation.
    """

    def __init__(
        self, engine: Engine, chat: ChatFormat, version: str, max_tokens: int = 160, temperature: float = 0.0
    ) -> None:
        super().__init__(engine, chat, version, max_tokens, temperature, Edits())


__all__ = ["DeltaWorldModel", "Edits"]
