"""What samples tokens in a run: the engine that the settings name, for each model one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy.lm.engine import Completion, Engine, Sampling, Scorer, scorer
from policy.lm.engines.inprocess.drafts import Drafts
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings
from real_envs.trajectory import Trajectory
from worldmodel.diffusion.checkpoint import mask_of
from worldmodel.diffusion.engine import CanvasEngine
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.formats.full import TransitionFormat, transition_tokens
from worldmodel.formats.reasoning import answers_with_reasoning


@dataclass(slots=True)
class Meter:
    """How many tokens were sampled so far."""

    tokens: int = 0


class MeteredEngine:
    """An ``Engine`` that counts on a meter what another one samples."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter
        self.context, self.version, self.exact, self.counts = (
            engine.context,
            engine.version,
            engine.exact,
            engine.counts,
        )

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        completion = await self._engine.complete(ids, sampling, seed, session)
        self._meter.tokens += len(completion.ids)
        return completion

    def release(self, session: Hashable) -> None:
        self._engine.release(session)

    def reset(self) -> None:
        self._engine.reset()

    def update_weights(self) -> None:
        self._engine.update_weights()
        self.version = self._engine.version


class MeteredScorer(MeteredEngine):
    """The same of one that scores; scored tokens were given, not sampled, and are not counted."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        super().__init__(engine, meter)
        self._scorer = scorer(engine)

    async def score(self, ids: Sequence[int], start: int, session: Hashable | None = None) -> tuple[float, ...]:
        return await self._scorer.score(ids, start, session)


class MeteredFiller(MeteredEngine):
    """The same of one that fills in canvases; what was given of them is counted too."""

    def __init__(self, engine: CanvasEngine, meter: Meter) -> None:
        super().__init__(engine, meter)
        self._filler, self.block = engine, engine.block

    async def fill(
        self,
        ids: Sequence[int],
        given: Mapping[int, int],
        sampling: Sampling,
        seed: int,
        session: Hashable | None = None,
        asked: int = 0,
    ) -> Completion:
        completion = await self._filler.fill(ids, given, sampling, seed, session, asked)
        self._meter.tokens += len(completion.ids)
        return completion


class Engines:
    """Makes engines that share the device of this process.

    Args:
        meter: counts what all of them sample; ``None`` counts nothing.
    """

    def __init__(self, settings: EngineSettings, meter: Meter | None = None) -> None:
        self.settings = settings
        self._meter = meter
        self._scheduler = DeviceScheduler()

    def make(self, model: Any, chat: ChatFormat, context: int, drafts: Drafts | None = None) -> Engine:
        """As ``_make``, metered where there is a meter."""
        engine = self._make(model, chat, context, drafts)
        if self._meter is None:
            return engine
        return (MeteredScorer if isinstance(engine, Scorer) else MeteredEngine)(engine, self._meter)

    def make_canvas(
        self, model: Any, chat: ChatFormat, context: int, diffusion: DiffusionSettings
    ) -> CanvasEngine | MeteredFiller:
        """The same of a model that fills in canvases, which is always run in this process.

        Raises:
            UserError: one sequence does not fit the memory, or diffusers is not installed.
        """
        engine = CanvasEngine(model, context, diffusion, mask_of(chat.tokenizer), self.settings, self._scheduler)
        return engine if self._meter is None else MeteredFiller(engine, self._meter)

    def _make(self, model: Any, chat: ChatFormat, context: int, drafts: Drafts | None = None) -> Engine:
        """What samples from a model of this process; a server is not asked for that, whatever the settings say.

        Args:
            drafts: guesses for the engine in process; vLLM has ways of its own.

        Raises:
            EngineUnavailable: vLLM is chosen and not there.
            UserError: one sequence does not fit the memory.
        """
        settings = self.settings
        if settings.name == "vllm":
            return VllmEngine(model, chat.tokenizer, context, settings, self._scheduler)
        used = drafts if settings.drafts else None
        return InProcessEngine(model, context, settings, used, scheduler=self._scheduler)


def drafts_from(log: Sequence[Trajectory], chat: ChatFormat, form: TransitionFormat) -> Drafts:
    """Guesses at what a world model writes, looked up in a log. They change how fast it dreams, and not what (in fp32
    exactly, in bf16 up to rounding).

    Contexts are left out: what they show, a guess finds in the prompt itself. Logged reasoning is a guess as well.
    """

    def tokens(t: Trajectory) -> list[int]:
        actions = [turn.action for turn in t.turns]
        return transition_tokens(chat, t.start, actions, answers_with_reasoning(form, t.start, t.turns)).ids

    return Drafts([tokens(t) for t in log if t.turns])
