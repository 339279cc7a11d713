"""A world model that fills in the next observation as a canvas, its status line with reward and end among it.

To the rest of the project it is a ``TextWorldModel`` whose engine fills in. It can also be asked what a causal model
cannot be: what stands between lines that are known (``infill``), and, where it was trained for that, which action leads
from here to there (``action_between``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from policy.lm.engine import Engine
from policy.lm.render import ChatFormat
from real_envs.errors import UserError
from real_envs.trajectory import Turn
from worldmodel.diffusion.engine import Filler
from worldmodel.diffusion.objective import InverseQuestion
from worldmodel.formats.full import TransitionFormat, prompt_tokens
from worldmodel.text import TextWorldModel
from worldmodel.world_model import Prediction


class FillingEngine(Engine, Filler, Protocol): ...


class DiffusionWorldModel(TextWorldModel):
    """A ``TextWorldModel`` that fills in canvases; see the module.

    The confidence is the product of the probabilities with which tokens were kept, up to the end of the answer. Tokens
    kept in one pass are independent of each other, so it is no probability of the text, and is too low where they
    depend on each other; at ``entropy_bound=0`` and temperature 1 it is that of the text in its order of filling.

    Args:
        inverse: how it was trained to be asked for actions; ``None`` if it was not.
    """

    def __init__(
        self,
        engine: FillingEngine,
        chat: ChatFormat,
        version: str,
        max_tokens: int = 160,
        temperature: float = 0.0,
        form: TransitionFormat | None = None,
        inverse: InverseQuestion | None = None,
    ) -> None:
        super().__init__(engine, chat, version, max_tokens, temperature, form)
        self._filler, self._inverse = engine, inverse

    @property
    def continues(self) -> bool:
        """A canvas is filled from all sides; ``infill`` takes known words."""
        return False

    def _like(self, temperature: float, form: TransitionFormat) -> DiffusionWorldModel:
        return DiffusionWorldModel(
            self._filler, self.chat, self.version, self.max_tokens, temperature, form, self._inverse
        )

    async def infill(
        self,
        start: str,
        history: Sequence[Turn],
        action: str,
        before: str,
        after: str,
        hidden: int,
        seed: int,
        session: object = None,
    ) -> Prediction:
        """What stands between two known parts of the observation that follows, and its reward and end.

        Args:
            before, after: how it begins, and how it ends; either may be empty.
            hidden: tokens between them, which are filled in; who does not know the number asks for several, and takes
                the one of the highest ``confidence ** (1 / hidden)``.

        Returns:
            The whole observation; the confidence is that of what was filled in.

        Raises:
            ValueError: both and what is hidden do not fit one canvas.
            PredictionInvalid, ContextFull, EngineFailure: as in ``predict``.
        """
        if hidden < 1:
            raise ValueError(f"at least one token must be hidden, got {hidden}")
        head, tail = self.chat.encode(before), self.chat.encode(after)
        given = dict(enumerate(head)) | {len(head) + hidden + at: token for at, token in enumerate(tail)}
        prompt = prompt_tokens(self.chat, self.form, start, history, action).ids
        completion = await self._filler.fill(prompt, given, self.sampling, seed, session)
        return self._parsed(prompt, completion, start, history).prediction

    async def action_between(
        self, start: str, history: Sequence[Turn], after: Turn, seed: int, session: object = None
    ) -> tuple[str, float]:
        """Which action leads from the history to a turn's observation, reward and end, such as for a log without
        actions. The turn's own action is not looked at.

        Returns:
            The action, and the product of the probabilities with which its tokens and its end were filled in.

        Raises:
            UserError: the model was not trained to be asked.
            ContextFull, EngineFailure: as in ``predict``.
        """
        if self._inverse is None:
            raise UserError(
                "this world model was not trained to be asked for actions: fit it with "
                "worldmodel.diffusion.inverse_share above 0"
            )
        chat, places = self.chat, self._inverse.action_tokens
        prompt = prompt_tokens(chat, self.form, start, history, "").ids[: -len(chat.to_assistant) or None]
        answer = (*chat.encode(self.form.answers(start, [*history, after])[-1]), chat.stop)
        canvas = self._inverse.canvas((), answer, chat.stop)
        given = dict(list(enumerate(canvas))[places:])
        sampling = replace(self.sampling, max_tokens=len(canvas))
        completion = await self._filler.fill(prompt, given, sampling, seed, session, asked=places)
        ids = completion.ids[:-1] if completion.stopped else completion.ids
        return chat.decode(ids), math.exp(sum(completion.logprobs))
