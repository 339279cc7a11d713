"""Generation for many episodes at once, with a model that lives in this process.

Every episode (*session*) has a slot that keeps its tokens, keys and values from turn to turn, so a turn costs its new
tokens and not its history. Each step feeds every running slot what it has not read yet: the rest of a prompt, a draft,
or the token sampled last. Slots that finish make room for requests that wait; nothing waits for the longest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from policy.lm.engine import Completion, ContextFull, EngineCounts, EngineFailure, Sampling
from policy.lm.engines.inprocess.decode import kv_shape, make_decoder
from policy.lm.engines.inprocess.drafts import Drafts
from policy.lm.engines.inprocess.feed import Feed
from policy.lm.engines.inprocess.queue import SlotQueue
from policy.lm.engines.inprocess.requests import DeviceScheduler, Request
from policy.lm.engines.inprocess.sampling import logprobs_of, sample
from policy.lm.engines.inprocess.slot_table import SlotTable, common_prefix, within

_STEP_TOKENS = 8192  # prompts are read in pieces of this size at most: it bounds the memory of a step
_LOGIT_NUMBERS = 1 << 24  # as many logits exist at a time
_WORTH_COPYING = 16  # tokens of a common beginning

_Outcome = Completion | tuple[float, ...] | Exception


class MemoryTooSmall(ValueError):
    """Not even one sequence of the whole context fits the stated memory."""


def affordable_slots(config: Any, context: int, slots: int, memory_gib: float, dtype: torch.dtype) -> int:
    """How many sequences are kept: ``slots``, or as many as have room for their keys and values.

    Raises:
        MemoryTooSmall: not even one has.
    """
    layers, heads, dim = kv_shape(config)
    per_slot = layers * 2 * heads * dim * (context + 1) * torch.empty((), dtype=dtype).element_size()
    affordable = int(memory_gib * 2**30 / per_slot)
    if affordable < 1:
        raise MemoryTooSmall(
            f"one sequence of {context} tokens needs {per_slot / 2**30:.2f} GiB of keys and values, but the budget "
            f"is {memory_gib} GiB: lower the context or raise the budget"
        )
    return min(slots, affordable)


class InProcessEngine:
    """Runs a transformers causal LM that lives in this process.

    Args:
        model: a decoder of transformers; what it may be is said in ``decode.make_decoder``.
        context: the longest sequence, prompt and completion together.
        slots: how many sequences are kept and run at a time; the rest waits.
        memory_gib: bound of all keys and values; there are fewer slots where it would be exceeded.
        dtype: in which to compute; the model's own by default. Log-probs equal the trainer's only as far as it is fine.
        drafts: guesses that save steps; ``None`` where texts are too unpredictable to be worth it.
        decode: ids to text, needed for stop strings.
        scheduler: shared by engines on the same device.

    Attributes:
        exact: log-probs are those of a trainer of the same model, up to the rounding of fp32.

    Raises:
        UnsupportedModel: other attention than full attention within ``context``.
        MemoryTooSmall: not even one slot fits ``memory_gib``.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        slots: int = 64,
        memory_gib: float = 4.0,
        dtype: torch.dtype | None = None,
        drafts: Drafts | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        scheduler: DeviceScheduler | None = None,
    ) -> None:
        self.model = model
        self.context = context
        self.version = 0
        self.counts = EngineCounts()
        self.drafts = drafts
        dtype = dtype or model.dtype
        self.exact = dtype == model.dtype == torch.float32
        self.slots = affordable_slots(model.config, context, slots, memory_gib, dtype)
        self._decoder = make_decoder(model, context, self.slots, dtype)
        self._stale = True
        self._vocab = int(model.config.vocab_size)
        self._state = SlotTable.empty(self.slots, context)
        self._decode = decode
        self._queue: SlotQueue[Request] = SlotQueue(self.slots, scheduler)

    @property
    def load(self) -> int:
        """Requests that wait or run; those that were cancelled do not count."""
        return self._queue.load

    def update_weights(self) -> None:
        """See ``Engine``. Call it between rollouts, after the model's weights changed.

        Raises:
            RuntimeError: requests are under way.
        """
        self.reset()
        self.version += 1
        self._stale = True

    def reset(self) -> None:
        """Forgets all text and what drafts learned, so that what follows does not depend on what was asked before.

        A seed decides a text anyway, but only up to rounding: other batches round in another way, in bf16 by enough to
        turn a token now and then.

        Raises:
            RuntimeError: requests are under way; they would go on from keys and values that are no longer theirs.
        """
        self._queue.clear()
        if self.drafts is not None:
            self.drafts.reset()
        self._state.fed[:] = 0

    def release(self, session: Hashable) -> None:
        """See ``Engine``."""
        self._queue.release(session)

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``.

        Raises:
            ContextFull: ``len(ids) + max_tokens`` exceeds the context.
            EngineFailure: the logits are not finite.
            ValueError: there is no id to continue, one the model does not know, or stop strings without ``decode``.
        """
        if len(ids) + sampling.max_tokens > self.context:
            raise ContextFull(f"{len(ids)} + {sampling.max_tokens} tokens do not fit a context of {self.context}")
        if not len(ids):
            raise ValueError("a completion needs at least one token to continue")
        if sampling.stop_strings and self._decode is None:
            raise ValueError("stop strings need an engine that was given `decode`")
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens)
        completion: Completion = await self._request(ids, sampling, uniforms, session)
        return completion

    async def score(self, ids: Sequence[int], start: int, session: Hashable | None = None) -> tuple[float, ...]:
        """See ``Scorer``. A scored episode stays cached like a sampled one; both kinds of request share a step.

        Raises:
            ContextFull: ``len(ids)`` exceeds the context.
            EngineFailure: a log-prob is not finite.
            ValueError: ``start`` leaves nothing before or behind it, or an id that the model does not know.
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
        return await self._queue.ask(request, self)

    def begin(self, slot: int, request: Request) -> bool:
        """See ``Stepper``. Keeps or copies what is cached of the prompt."""
        state, n, most = self._state, len(request.ids), request.known
        cached = int(common_prefix(state.ids[slot : slot + 1], np.minimum(state.fed[slot], most), request.ids)[0])
        if cached < state.fed[slot] or not cached:  # a new episode, or one that left its own path
            common = common_prefix(state.ids, np.minimum(state.fed, most), request.ids)
            donor = int(common.argmax())
            known = np.where(np.isin(np.arange(self.slots), list(self._queue.running)), state.length, 0)
            coming = int(common_prefix(state.ids, np.minimum(known, most), request.ids).max())
            if coming >= max(cached, common[donor]) + _WORTH_COPYING:
                return False  # a neighbour is about to read the same beginning; a step later it can be copied
            if common[donor] >= cached + _WORTH_COPYING:
                cached = int(common[donor])
                self._decoder.cache.copy(donor, slot, cached)
        self.counts.reused += cached
        state.ids[slot, :n] = request.ids
        state.fed[slot] = cached
        state.prompt[slot] = most + 1
        state.length[slot] = state.end[slot] = n if request.score_from is None else n - 1  # nothing follows the last id
        state.scored[slot] = request.score_from is not None
        state.uniforms[slot, n : n + len(request.uniforms)] = request.uniforms
        sampling = request.sampling
        state.temperature[slot], state.top_k[slot], state.top_p[slot] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        state.stop[slot], state.limit[slot] = sampling.stop, n + sampling.max_tokens
        state.by_hand[slot] = self.drafts is not None or bool(sampling.stop_strings) or request.score_from is not None
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
        request.draft = self.drafts.propose(state.ids[slot, :length], request.sampling.stop, room)
        if request.draft is not None:
            n = len(request.draft.ids)
            state.ids[slot, length : length + n] = request.draft.ids
            state.end[slot] = length + n

    @torch.inference_mode()
    def step(self) -> dict[int, _Outcome]:
        """See ``Stepper``: one forward pass for all running slots."""
        if self._stale:
            self._decoder.refresh()
            self._stale = False
        state = self._state
        slots = np.sort(np.fromiter(self._queue.running, dtype=np.int64))
        starts, ends = state.fed[slots], state.end[slots]
        counts = within(ends - starts, _STEP_TOKENS)
        slots, starts, counts = slots[counts > 0], starts[counts > 0], counts[counts > 0]
        rows = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        of_slot = slots[rows]
        wanted = np.flatnonzero(positions >= state.prompt[of_slot] - 1)
        feed = Feed(slots, starts, counts, state.ids[of_slot, positions], wanted)
        ids, logprobs = self._sample(self._decoder.hidden(feed), of_slot[wanted], positions[wanted] + 1)
        state.fed[slots] = starts + counts
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
        top_k = state.top_k[slots] if state.top_k[slots].any() else None
        top_p = state.top_p[slots] if (state.top_p[slots] < 1).any() else None
        ids, logprobs = np.empty(len(at), dtype=np.int64), np.empty(len(at))
        size = max(1, _LOGIT_NUMBERS // self._vocab)
        for done in range(0, len(at), size):
            part = slice(done, done + size)
            optional = (None if x is None else torch.from_numpy(x[part]).to(device) for x in (top_k, top_p))
            logits = self._decoder.logits(hidden[part])
            if given[part].all():
                ids[part] = state.ids[slots[part], at[part]]
                logprobs[part] = logprobs_of(logits, ids[part])
                continue
            chosen, scored = sample(
                logits,
                torch.from_numpy(temperature[part]).to(device),
                torch.from_numpy(uniforms[part]).to(device),
                *optional,
            )
            ids[part], logprobs[part] = chosen.cpu().numpy(), scored.cpu().numpy()
            if given[part].any():
                those = np.flatnonzero(given[part])
                told = state.ids[slots[part][those], at[part][those]]
                ids[done + those] = told
                logprobs[done + those] = logprobs_of(logits[torch.from_numpy(those).to(device)], told)
        return ids, logprobs

    def _go_on(self, slots: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Keeps the one token of each row that just goes on, all at once; ``[row]``, which ones these are.

        Most rows of most steps: one by one they would take longer than some layers of a small model.
        """
        state, at = self._state, np.minimum(bounds[:-1], len(ids) - 1)
        one, lengths = bounds[1:] - bounds[:-1] == 1, state.length[slots]
        if not len(ids):
            return one
        mundane: np.ndarray = one & ~state.by_hand[slots] & (lengths + 1 < state.limit[slots])
        mundane &= (ids[at] != state.stop[slots]) & np.isfinite(logprobs[at])
        at, slots, lengths = at[mundane], slots[mundane], lengths[mundane]
        state.ids[slots, lengths], state.logprobs[slots, lengths] = ids[at], logprobs[at]
        state.fed[slots] = lengths
        state.length[slots] = state.end[slots] = lengths + 1
        return mundane

    def _accept(self, slot: int, ids: np.ndarray, logprobs: np.ndarray) -> Completion | Exception | None:
        """Keeps sampled tokens up to the first that differs from the draft; returns what ends the request, if so."""
        state, request = self._state, self._queue.running[slot]
        begin, prompt = int(state.length[slot]), int(state.prompt[slot])
        drafted = state.ids[slot, begin : begin + len(ids) - 1]
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
        state.ids[slot, begin : begin + kept] = ids[:kept]
        state.logprobs[slot, begin : begin + kept] = logprobs[:kept]
        string_end = self._stop_string(slot, request, begin, begin + kept)
        if string_end is not None:
            kept = string_end - begin
        end = begin + kept
        state.length[slot] = state.end[slot] = end
        state.fed[slot] = end - 1  # the last token was sampled, not read
        stopped = bool(len(stops)) or string_end is not None
        if stopped or end >= state.limit[slot]:
            self.counts.generated += end - prompt
            made = slice(prompt, end)
            return Completion(
                tuple(state.ids[slot, made].tolist()),
                tuple(state.logprobs[slot, made].tolist()),
                stopped,
                self.version,
            )
        self._propose(slot, request)
        return None

    def _scored(self, slot: int, logprobs: np.ndarray) -> tuple[float, ...] | Exception | None:
        """Keeps log-probs of given tokens; returns all once the last one is there. A long text comes in pieces."""
        state, request = self._state, self._queue.running[slot]
        if not np.isfinite(logprobs).all():
            return EngineFailure("the model's log-probs are not finite")
        done = int(state.fed[slot]) + 1  # the ids up to here have one
        state.logprobs[slot, done - len(logprobs) : done] = logprobs
        if done < len(request.ids):
            return None
        start = request.score_from or 0
        self.counts.scored += len(request.ids) - start
        return tuple(state.logprobs[slot, start:done].tolist())

    def _stop_string(self, slot: int, request: Request, begin: int, end: int) -> int | None:
        """Where the sampled text first contains a stop string, as the position after the token that completes it."""
        if not request.sampling.stop_strings or self._decode is None:
            return None
        prompt, ids = int(self._state.prompt[slot]), self._state.ids[slot]
        for at in range(begin + 1, end + 1):
            text = self._decode(ids[prompt:at].tolist())
            if any(stop in text for stop in request.sampling.stop_strings):
                return at
        return None

    def forget(self, slot: int, error: Exception | None) -> None:
        """See ``Stepper``. What broke with its own numbers leaves NaN in the slot."""
        self._state.fed[slot] = 0
        if isinstance(error, EngineFailure):
            self._decoder.cache.clear(slot)


__all__ = ["InProcessEngine", "MemoryTooSmall", "affordable_slots"]
