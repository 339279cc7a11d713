"""What samples tokens in a run: the engine that the settings name, for each model one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from policy.lm.engine import Engine, EngineCounts
from policy.lm.engines.inprocess.drafts import Drafts
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings
from real_envs.trajectory import Trajectory
from worldmodel.diffusion.engine import CanvasEngine, mask_of
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.formats.full import TransitionFormat, transition_tokens
from worldmodel.formats.reasoning import answers_with_reasoning


class Engines:
    """Makes engines that share the device of this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        graphed = settings.graphs and settings.name != "vllm" and torch.cuda.is_available()
        self._scheduler = DeviceScheduler(stay=8 if graphed else 1)
        self._counts: list[EngineCounts] = []  # not the engines, whose memory goes with their models

    @property
    def tokens(self) -> int:
        """How many all of them have sampled; of canvases, what was given of them included."""
        return sum(counts.generated for counts in self._counts)

    def make(self, model: Any, chat: ChatFormat, context: int, drafts: Drafts | None = None) -> Engine:
        """What samples from a model of this process; a server is not asked for that, whatever the settings say.

        Raises:
            EngineUnavailable: vLLM is chosen and not there.
            UserError: one sequence does not fit the memory.
        """
        settings = self.settings
        engine: Engine
        if settings.name == "vllm":
            engine = VllmEngine(model, chat.tokenizer, context, settings, self._scheduler)
        else:
            used = drafts if settings.drafts else None
            engine = InProcessEngine(model, context, settings, used, scheduler=self._scheduler)
        self._counts.append(engine.counts)
        return engine

    def make_canvas(self, model: Any, chat: ChatFormat, context: int, diffusion: DiffusionSettings) -> CanvasEngine:
        """The same of a model that fills in canvases, which is always run in this process.

        Raises:
            UserError: one sequence does not fit the memory, or diffusers is not installed.
        """
        engine = CanvasEngine(model, context, diffusion, mask_of(chat.tokenizer), self.settings, self._scheduler)
        self._counts.append(engine.counts)
        return engine


def drafts_from(log: Sequence[Trajectory], chat: ChatFormat, form: TransitionFormat) -> Drafts:
    """Guesses at what a world model writes, looked up in a log. They change how fast it dreams, and not what (in fp32
    exactly, in bf16 up to rounding).

    Contexts are left out: what they show, a guess finds in the prompt itself. Logged reasoning is a guess as well.
    """

    def tokens(t: Trajectory) -> list[int]:
        actions = [turn.action for turn in t.turns]
        return transition_tokens(chat, t.start, actions, answers_with_reasoning(form, t.start, t.turns)).ids

    return Drafts([tokens(t) for t in log if t.turns])
