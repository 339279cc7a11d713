"""Canvases filled in for many episodes at once, with a model that lives in this process: an ``Engine``.

Every episode keeps a slot with the keys and values of its text from turn to turn, as in ``InProcessEngine``. New tokens
of a text are read once, from left to right. A canvas is read again in each pass, with the tokens that are known by now;
its keys and values are overwritten each time. All running canvases share a pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from policy.lm.engine import Completion, EngineFailure, Sampling, UnsupportedModel, check_room
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler, SlotEngine, common_prefix, within
from policy.lm.engines.inprocess.slots import Feed
from policy.lm.forward import attention_window, decoder, evaluating
from policy.lm.settings import EngineSettings
from policy.lm.tokenizer import MASK
from real_envs.errors import UserError
from worldmodel.diffusion.objective import Canvas, canvas_states, lay_out, without_mask
from worldmodel.diffusion.sampling import CanvasEdit, draft_of, make_sampler
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.text import TextWorldModel

_STEP_TOKENS = 8192  # texts are read in pieces of this size at most: it bounds the memory of a step


@dataclass(slots=True)
class _ActiveRequest:
    """An answer under way."""

    text: list[int]  # the prompt and the canvases that are done
    prompt: int
    sampling: Sampling
    generator: torch.Generator
    session: Hashable | None
    future: asyncio.Future[Completion]
    canvas: np.ndarray  # the tokens under way; the mask where one is hidden
    logprobs: list[float] = field(default_factory=list)  # of the tokens of the answer so far
    own: np.ndarray = field(init=False)  # log-probs of the canvas under way
    passes: int = 0  # over the canvas under way
    passed: int = 0
    # what the canvas under way is looked at as, before any of it is filled in; ``None`` where that is over
    edit: CanvasEdit | None = None

    def __post_init__(self) -> None:
        self.own = np.zeros(len(self.canvas))

    def shown(self) -> np.ndarray:
        """What the next pass reads."""
        return self.canvas if self.edit is None else self.edit.shown


class CanvasEngine(SlotEngine[_ActiveRequest]):
    """Fills in canvases with a transformers causal LM that was trained for it (``worldmodel.diffusion.objective``).

    A seed decides an answer whatever else is under way, up to rounding. Log-probs are those with which tokens were
    kept: of tokens that were kept in one pass none knows of the others, so their sum is no log-prob of the answer.

    Args:
        mask: the id that hides a token.

    Attributes:
        passes: over canvases of finished completions, each counted by itself.

    Raises:
        UserError: diffusers is not installed.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        diffusion: DiffusionSettings,
        mask: int,
        settings: EngineSettings | None = None,
        scheduler: DeviceScheduler | None = None,
    ) -> None:
        super().__init__(model, context, settings, scheduler)
        self.block, self.mask = diffusion.block, mask
        self.exact, self.passes = False, 0
        self._sampler, self._edit = make_sampler(diffusion), diffusion.edit

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """
        Raises:
            ContextFull: ``len(ids) + max_tokens`` exceeds the context.
            EngineFailure: the logits are not finite.
            ValueError: no id to continue.
        """
        check_room(ids, sampling, self.context)
        if not len(ids):
            raise ValueError("an answer needs at least one token before it")
        request = _ActiveRequest(
            list(ids),
            len(ids),
            sampling,
            torch.Generator(self.model.device).manual_seed(seed),
            session,
            asyncio.get_running_loop().create_future(),
            self._hidden(len(ids)),
            edit=self._draft(ids, sampling.stop),
        )
        completion: Completion = await self._ask(request)
        return completion

    def _hidden(self, length: int) -> np.ndarray:
        return np.full(min(self.block, self.context - length), self.mask, dtype=np.int64)

    def _draft(self, text: Sequence[int], stop: int) -> CanvasEdit | None:
        if not self._edit:
            return None
        return draft_of(text, min(self.block, self.context - len(text)), self.mask, stop)

    def _begin(self, slot: int, request: _ActiveRequest) -> bool:
        """See ``SlotEngine``. Keeps or copies what is cached of the text."""
        ids = np.asarray(request.text, dtype=np.int64)
        self._take_over(slot, ids, common_prefix(self._ids, np.minimum(self._fed, len(ids)), ids))
        return True

    def _step(self) -> dict[int, Completion | Exception]:
        """See ``SlotEngine``: reads what is new of the texts, and makes a pass over the canvases whose text is read."""
        slots = np.sort(np.fromiter(self._running, dtype=np.int64))
        self._read(slots)
        ready = [int(slot) for slot in slots if self._fed[slot] == len(self._running[slot].text)]
        if not ready:
            return {}
        requests = [self._running[slot] for slot in ready]
        counts = np.array([len(request.canvas) for request in requests])
        tokens = np.concatenate([request.shown() for request in requests])
        hidden = np.flatnonzero(tokens == self.mask)
        outcomes: dict[int, Completion | Exception] = {}
        if len(hidden):
            states = self._run(Feed(np.array(ready), self._fed[ready], counts, tokens, hidden, canvas=True))
            logits = without_mask(self._decoder.logits(states), self.mask)
            sizes = [int((request.shown() == self.mask).sum()) for request in requests]
            for slot, request, its in zip(ready, requests, logits.split(sizes), strict=True):
                if len(its) and not self._keep(request, its):
                    outcomes[slot] = EngineFailure("the model's logits are not finite")
        for slot, request in zip(ready, requests, strict=True):
            if slot not in outcomes and (done := self._go_on(request, slot)) is not None:
                outcomes[slot] = done
        return outcomes

    def _read(self, slots: np.ndarray) -> None:
        starts = self._fed[slots]
        lengths = np.array([len(self._running[int(slot)].text) for slot in slots])
        counts = within(lengths - starts, _STEP_TOKENS)
        some = counts > 0
        if not some.any():
            return
        slots, starts, counts = slots[some], starts[some], counts[some]
        tokens = np.concatenate([self._ids[s, b : b + n] for s, b, n in zip(slots, starts, counts, strict=True)])
        self._run(Feed(slots, starts, counts, tokens, np.zeros(0, dtype=np.int64)))
        self._fed[slots] = starts + counts

    def _run(self, feed: Feed) -> torch.Tensor:
        self.counts.steps += 1
        self.counts.fed += len(feed.tokens)
        return self._decoder.hidden(feed)

    def _keep(self, request: _ActiveRequest, logits: torch.Tensor) -> bool:
        """Fills in what this pass decides; false where the logits are broken."""
        sampling, places = request.sampling, np.flatnonzero(request.shown() == self.mask)
        if logits.isnan().any() or logits.isposinf().any():
            return False
        request.passes += 1
        if request.edit is not None:
            if request.edit.score(logits):
                where, logprobs = request.edit.likely(self._edit)
                request.canvas[where], request.own[where] = request.edit.draft[where], logprobs[where]
                request.edit, request.passes, request.passed = None, 0, request.passed + request.passes
            return True
        kept = self._sampler(logits, sampling.temperature, request.passes, request.generator)
        where = kept.where.cpu().numpy()
        request.canvas[places[where]] = kept.tokens.cpu().numpy()[where]
        request.own[places[where]] = kept.logprobs.cpu().numpy()[where]
        return True

    def _go_on(self, request: _ActiveRequest, slot: int) -> Completion | None:
        """The answer if it is over; where only its canvas is, the next one."""
        stop, canvas = request.sampling.stop, request.canvas
        stops = np.flatnonzero(canvas == stop)
        if len(stops):
            canvas[stops[0] :] = stop  # behind an end there is nothing but ends
        end = int(stops[0]) + 1 if len(stops) else len(canvas)
        if (canvas[:end] == self.mask).any():
            return None
        request.text += canvas[:end].tolist()
        request.logprobs += request.own[:end].tolist()
        request.passed += request.passes
        length, most = len(request.text), request.prompt + request.sampling.max_tokens
        if len(stops) or length >= most:
            self.counts.generated += min(length, most) - request.prompt
            self.passes += request.passed
            ids = tuple(request.text[request.prompt : most])
            return Completion(
                ids, tuple(request.logprobs[: len(ids)]), bool(len(stops)) and length <= most, self.version
            )
        self._ids[slot, length - end : length] = canvas[:end]
        request.canvas = self._hidden(length)
        request.own = np.zeros(len(request.canvas))
        request.passes = 0
        request.edit = self._draft(request.text, stop)
        return None


class DiffusionWorldModel(TextWorldModel):
    """A ``TextWorldModel`` whose engine fills in canvases, the status line with reward and end among them.

    The confidence is the product of the probabilities with which tokens were kept, up to the end of the answer. Tokens
    kept in one pass are independent of each other, so it is no probability of the text, and is too low where they
    depend on each other; at ``entropy_bound=0`` and temperature 1 it is that of the text in its order of filling.
    """

    @property
    def continues(self) -> bool:
        """A canvas is filled in from all sides."""
        return False


_BLOCK = "diffusion_block"  # in the config


def with_mask(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a pretrained model a mask token where it has none; its embedding starts as the mean of all others."""
    known = len(tokenizer)  # the model may have more rows than that, which mean nothing
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    weight = model.get_input_embeddings().weight.data
    weight[known : len(tokenizer)] = weight[:known].mean(0)


def mask_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token.

    Raises:
        UserError: there is none.
    """
    mask = tokenizer.mask_token_id
    if not isinstance(mask, int):
        raise UserError(f"the tokenizer of {tokenizer.name_or_path!r} has no mask token, which diffusion needs")
    return mask


def mark(model: Any, settings: DiffusionSettings) -> None:
    """Writes into the model's config which canvases it was trained to fill in."""
    setattr(model.config, _BLOCK, settings.block)


def check_trained(model: Any, where: object, block: int) -> None:
    """Raises ``UserError`` for a model of next tokens, or of canvases of another length."""
    trained = getattr(model.config, _BLOCK, None)
    if trained is None:
        raise UserError(
            f"{where}: this model was trained to predict the next token and cannot fill in a canvas; run "
            "`imagine fit-world-model` with worldmodel.kind=diffusion"
        )
    if trained != block:
        raise UserError(
            f"{where}: this model was trained with worldmodel.diffusion.block={trained}, not {block}; set it back, or "
            "run `imagine fit-world-model`"
        )


@torch.no_grad()
def check_canvases(model: Any, context: int) -> None:
    """Checks that canvases can stand beside a text in this model, by a pass over a few tokens.

    The text must not depend on them, and they must see all of themselves.

    Raises:
        UnsupportedModel: they cannot.
    """
    window = attention_window(model.config)
    if window is not None and window < context:
        raise UnsupportedModel(
            f"{model.config.model_type} attends to {window} tokens: lower worldmodel.context to that for diffusion"
        )
    text = torch.arange(1, 5, device=model.device)[None]
    layout = lay_out(text, [Canvas(0, 2, (3, 4), 1.0)])
    other = layout.ids.clone()
    other[0, -1] = 1
    with evaluating(model):
        alone = decoder(model)(input_ids=text, use_cache=False).last_hidden_state[0].float()
        beside, changed = (canvas_states(model, layout, ids)[0].float() for ids in (layout.ids, other))
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    text_same = (beside[:4] - alone).norm() <= tolerance * alone.norm()
    canvas_seen = (changed[4] - beside[4]).norm() > 0
    if not (text_same and canvas_seen and torch.equal(beside[:4], changed[:4])):
        raise UnsupportedModel(
            f"{model.config.model_type} does not follow the attention mask, which worldmodel.kind=diffusion needs: "
            "choose a model with standard attention"
        )
