"""Generation for many episodes at once, with a model that lives in this process.

Every episode (*session*) has a slot that keeps its tokens, keys and values from turn to turn, so a turn costs its new
tokens and not its history. Each step feeds every running slot what it has not read yet: the rest of a prompt, a draft,
or the token sampled last. Slots that finish make room for requests that wait; nothing waits for the longest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from policy.lm.engine import Completion, ContextFull, EngineFailure, Sampling, check_room
from policy.lm.engines.inprocess.drafts import Draft, Drafts
from policy.lm.engines.inprocess.slot_engine import WORTH_COPYING, DeviceScheduler, SlotEngine, common_prefix, within
from policy.lm.engines.inprocess.slots import Feed
from policy.lm.settings import EngineSettings

_STEP_TOKENS = 8192  # prompts are read in pieces of this size at most: it bounds the memory of a step
_LOGIT_NUMBERS = 1 << 24  # as many logits exist at a time

_Outcome = Completion | tuple[float, ...] | Exception


class SlotTable:
    """The requests in the slots as arrays with one entry per slot: no work per token in Python."""

    def __init__(self, slots: int, context: int) -> None:
        self.logprobs = np.zeros((slots, context))  # of sampled tokens
        self.uniforms = np.zeros((slots, context))  # for the token at this position
        self.prompt = np.zeros(slots, dtype=np.int64)  # length of the prompt
        self.length = np.zeros(slots, dtype=np.int64)  # length of prompt and sampled tokens
        self.end = np.zeros(slots, dtype=np.int64)  # length with the draft
        self.temperature = np.ones(slots, dtype=np.float32)
        self.stop = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)  # length of the prompt and the longest completion
        self.one_by_one = np.zeros(slots, dtype=bool)  # tokens need drafts or scores
        self.scored = np.zeros(slots, dtype=bool)  # the tokens are given and only scored


@dataclass(slots=True)
class Request:
    """One completion, or one text to score, that waits or runs."""

    ids: np.ndarray  # the prompt, or the whole text to score
    sampling: Sampling
    uniforms: np.ndarray  # one in [0, 1) per token to sample, drawn from the request's own seed
    session: Hashable | None
    future: asyncio.Future[Any]
    draft: Draft | None = None  # the guess that stands behind the tokens so far
    # log-probs of ``ids`` from here on are asked for, and nothing is sampled; ``None`` samples
    score_from: int | None = None

    @property
    def known(self) -> int:
        """How many leading ids need no hidden state of their own, so that they may come from a cache."""
        return (len(self.ids) if self.score_from is None else self.score_from) - 1


class InProcessEngine(SlotEngine[Request]):
    """Runs a transformers causal LM that lives in this process.

    Args:
        drafts: speculative decoding from these; ``None`` where texts are too unpredictable.

    Other arguments and exceptions: see ``SlotEngine``.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        settings: EngineSettings | None = None,
        drafts: Drafts | None = None,
        scheduler: DeviceScheduler | None = None,
    ) -> None:
        super().__init__(model, context, settings, scheduler)
        self.drafts = drafts
        self._vocab = int(model.config.vocab_size)
        self._state = SlotTable(self.slots, context)

    def reset(self) -> None:
        """Forgets all text and what drafts learned. See ``SlotEngine``."""
        super().reset()
        if self.drafts is not None:
            self.drafts.reset()

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``; ``ValueError``: no id to continue, or an unknown one."""
        check_room(ids, sampling, self.context)
        if not len(ids):
            raise ValueError("a completion needs at least one token to continue")
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens)
        completion: Completion = await self._request(ids, sampling, uniforms, session)
        return completion

    async def score(self, ids: Sequence[int], start: int, session: Hashable | None = None) -> tuple[float, ...]:
        """See ``Scorer``; ``ValueError``: ``start`` leaves nothing before or behind it, or an unknown id.

        A scored episode stays cached like a sampled one; both kinds of request share a step.
        """
        if len(ids) > self.context:
            raise ContextFull(f"{len(ids)} tokens do not fit a context of {self.context}")
        if not 1 <= start < len(ids):
            raise ValueError(f"start must lie between 1 and the last of {len(ids)} ids, got {start}")
        nothing = Sampling(max_tokens=1, stop=-1)
        logprobs: tuple[float, ...] = await self._request(ids, nothing, np.zeros(0), session, start)
        return logprobs

    async def _request(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        uniforms: np.ndarray,
        session: Hashable | None,
        score_from: int | None = None,
    ) -> Any:
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise ValueError(f"the model knows the ids 0 to {self._vocab - 1}, got {min(ids)} to {max(ids)}")
        future = asyncio.get_running_loop().create_future()
        request = Request(np.asarray(ids, dtype=np.int64), sampling, uniforms, session, future, score_from=score_from)
        return await self._ask(request)

    def _begin(self, slot: int, request: Request) -> bool:
        """See ``SlotEngine``. Keeps or copies what is cached of the prompt."""
        state, ids, n, most = self._state, request.ids, len(request.ids), request.known
        common = np.zeros(self.slots, dtype=np.int64)
        common[slot] = common_prefix(self._ids[slot : slot + 1], np.minimum(self._fed[slot], most), ids)[0]
        if common[slot] < self._fed[slot] or not common[slot]:  # a new episode, or one that left its own path
            common = common_prefix(self._ids, np.minimum(self._fed, most), ids)
            known = np.where(np.isin(np.arange(self.slots), list(self._running)), state.length, 0)
            coming = int(common_prefix(self._ids, np.minimum(known, most), ids).max())
            if coming >= common.max() + WORTH_COPYING:
                return False  # a neighbour is about to read the same beginning; a step later it can be copied
        self._take_over(slot, ids, common)
        state.prompt[slot] = most + 1
        state.length[slot] = state.end[slot] = n if request.score_from is None else n - 1  # nothing follows the last id
        state.scored[slot] = request.score_from is not None
        state.uniforms[slot, n : n + len(request.uniforms)] = request.uniforms
        sampling = request.sampling
        state.temperature[slot], state.stop[slot] = sampling.temperature, sampling.stop
        state.limit[slot] = n + sampling.max_tokens
        state.one_by_one[slot] = self.drafts is not None or request.score_from is not None
        if request.score_from is None:
            self._propose(slot, request)
        return True

    def _propose(self, slot: int, request: Request) -> None:
        state = self._state
        length = int(state.length[slot])
        request.draft = None
        if self.drafts is None:
            return
        room = int(state.limit[slot]) - length - 1  # one is sampled behind the draft
        request.draft = self.drafts.propose(self._ids[slot, :length], request.sampling.stop, room)
        if request.draft is not None:
            n = len(request.draft.ids)
            self._ids[slot, length : length + n] = request.draft.ids
            state.end[slot] = length + n

    def _step(self) -> dict[int, _Outcome]:
        """See ``SlotEngine``: one forward pass for all running slots."""
        state = self._state
        slots = np.sort(np.fromiter(self._running, dtype=np.int64))
        starts, ends = self._fed[slots], state.end[slots]
        counts, widest = ends - starts, max(self._decoder.widths, default=0)
        if widest:
            counts = _of_one_shape(counts, widest)
        if counts.max() > widest:
            counts = within(counts, _STEP_TOKENS)
        now = counts > 0
        slots, starts, counts = slots[now], starts[now], counts[now]
        rows = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        of_slot = slots[rows]
        wanted = np.flatnonzero(positions >= state.prompt[of_slot] - 1)
        feed = Feed(slots, starts, counts, self._ids[of_slot, positions], wanted)
        ids, logprobs = self._sample(self._decoder.hidden(feed), of_slot[wanted], positions[wanted] + 1)
        self._fed[slots] = starts + counts
        self.counts.steps += 1
        self.counts.fed += len(rows)
        outcomes: dict[int, _Outcome] = {}
        bounds = np.searchsorted(rows[wanted], np.arange(len(slots) + 1))
        gone_on = self._go_on(slots, ids, logprobs, bounds)
        for row, slot in enumerate(slots.tolist()):
            low, high = bounds[row], bounds[row + 1]
            if low < high and not gone_on[row]:
                outcome: _Outcome | None
                if state.scored[slot]:
                    outcome = self._scored(slot, logprobs[low:high])
                else:
                    outcome = self._accept(slot, ids[low:high], logprobs[low:high])
                if outcome is not None:
                    outcomes[slot] = outcome
        return outcomes

    def _sample(self, hidden: torch.Tensor, slots: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the tokens at positions ``at``, given the hidden states before them."""
        state, device = self._state, hidden.device
        temperature, uniforms = state.temperature[slots], state.uniforms[slots, at]
        given = state.scored[slots]
        ids, logprobs = np.empty(len(at), dtype=np.int64), np.empty(len(at))
        size = max(1, _LOGIT_NUMBERS // self._vocab)
        for done in range(0, len(at), size):
            part = slice(done, done + size)
            logits = self._decoder.logits(hidden[part])
            if given[part].all():
                ids[part] = self._ids[slots[part], at[part]]
                logprobs[part] = logprobs_of(logits, ids[part])
                continue
            sampled = sample(logits, torch.from_numpy(temperature[part]), torch.from_numpy(uniforms[part]))
            ids[part], logprobs[part] = torch.stack([x.double() for x in sampled]).cpu().numpy()  # one copy to the host
            if given[part].any():
                those = np.flatnonzero(given[part])
                given_ids = self._ids[slots[part][those], at[part][those]]
                ids[done + those] = given_ids
                logprobs[done + those] = logprobs_of(logits[torch.from_numpy(those).to(device)], given_ids)
        return ids, logprobs

    def _go_on(self, slots: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Keeps the one token of each row that just goes on, all at once; ``[row]``, which ones these are.

        Most rows of most steps: one by one they would take longer than some layers of a small model.
        """
        state, at = self._state, np.minimum(bounds[:-1], len(ids) - 1)
        one, lengths = bounds[1:] - bounds[:-1] == 1, state.length[slots]
        if not len(ids):
            return one
        simple: np.ndarray = one & ~state.one_by_one[slots] & (lengths + 1 < state.limit[slots])
        simple &= (ids[at] != state.stop[slots]) & np.isfinite(logprobs[at])
        at, slots, lengths = at[simple], slots[simple], lengths[simple]
        self._ids[slots, lengths], state.logprobs[slots, lengths] = ids[at], logprobs[at]
        self._fed[slots] = lengths
        state.length[slots] = state.end[slots] = lengths + 1
        return simple

    def _accept(self, slot: int, ids: np.ndarray, logprobs: np.ndarray) -> Completion | Exception | None:
        """Keeps sampled tokens up to the first that differs from the draft; returns what ends the request, if so."""
        state, request = self._state, self._running[slot]
        begin, prompt = int(state.length[slot]), int(state.prompt[slot])
        drafted = self._ids[slot, begin : begin + len(ids) - 1]
        wrong = np.flatnonzero(ids[:-1] != drafted)
        kept = int(wrong[0]) + 1 if len(wrong) else len(ids)
        if request.draft is not None and self.drafts is not None:
            self.drafts.observe(request.draft, kept - 1)
            self.counts.drafted += len(request.draft.ids)
            self.counts.accepted += kept - 1
        ids, logprobs = ids[:kept], logprobs[:kept]
        if not np.isfinite(logprobs).all():
            return EngineFailure("the model's log-probs are not finite")
        stops = np.flatnonzero(ids == request.sampling.stop)
        kept = int(stops[0]) + 1 if len(stops) else kept
        self._ids[slot, begin : begin + kept] = ids[:kept]
        state.logprobs[slot, begin : begin + kept] = logprobs[:kept]
        end = begin + kept
        state.length[slot] = state.end[slot] = end
        self._fed[slot] = end - 1  # the last token was sampled, not read
        stopped = bool(len(stops))
        if stopped or end >= state.limit[slot]:
            self.counts.generated += end - prompt
            made = slice(prompt, end)
            return Completion(
                tuple(self._ids[slot, made].tolist()), tuple(state.logprobs[slot, made].tolist()), stopped, self.version
            )
        self._propose(slot, request)
        return None

    def _scored(self, slot: int, logprobs: np.ndarray) -> tuple[float, ...] | Exception | None:
        """Keeps log-probs of given tokens; returns all once the last one is there. A long text comes in pieces."""
        state, request = self._state, self._running[slot]
        if not np.isfinite(logprobs).all():
            return EngineFailure("the model's log-probs are not finite")
        done = int(self._fed[slot]) + 1  # the ids up to here have one
        state.logprobs[slot, done - len(logprobs) : done] = logprobs
        if done < len(request.ids):
            return None
        start = request.score_from or 0
        self.counts.scored += len(request.ids) - start
        return tuple(state.logprobs[slot, start:done].tolist())


def _of_one_shape(counts: np.ndarray, widest: int) -> np.ndarray:
    """How many tokens each row is fed where steps of single tokens are the cheapest, and those of up to ``widest``
    tokens cheap: rows of several tokens wait for each other until they are an eighth of all. Where no step of several
    tokens is cheap (``widest`` is 1), they then go alone.

    Example::

        widest 4: [1] * 8 + [7] -> [1] * 8 + [0]; [1] * 6 + [5, 7] -> [1] * 6 + [4, 4]
    """
    several = counts > 1
    if 8 * several.sum() < (counts > 0).sum():
        return np.where(several, 0, counts)
    return np.minimum(counts, widest) if widest > 1 else np.where(several, counts, 0)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, at the place where the cumulative distribution passes the row's uniform number.

    So a seed decides a text, whatever else is computed; in bf16 up to the rounding of other batches.

    Args:
        logits: ``[row, vocab]``, fp32.
        temperature: ``[row]``, on the CPU, so that nobody waits for its values; 0 means greedy.
        uniforms: ``[row]`` in [0, 1), fp64, on any device.

    Returns:
        ids ``[row]`` and their log-probs ``[row]`` under the distribution sampled from (at temperature 1 where greedy).
    """
    greedy = temperature == 0
    any_greedy = bool(greedy.any())
    scaled = logits
    if not bool((temperature == 1).all()):  # a pass over all logits, most often for nothing
        scaled = logits / torch.where(greedy, 1.0, temperature).to(logits.device)[:, None]
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # scaled by the total, so that rounding never leaves the number above the last step
    drawn = torch.searchsorted(cumulative, (uniforms.to(logits.device) * cumulative[:, -1])[:, None], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    ids = torch.where(greedy.to(logits.device), logits.argmax(-1), drawn) if any_greedy else drawn
    return ids, probabilities.gather(-1, ids[:, None])[:, 0].log()


def logprobs_of(logits: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """Of given ``ids`` ``[n]`` under ``logits`` ``[n, vocab]``: ``[n]``."""
    wanted = torch.from_numpy(ids).to(logits.device)[:, None]
    logprobs: np.ndarray = logits.log_softmax(-1).gather(-1, wanted)[:, 0].cpu().numpy()
    return logprobs
