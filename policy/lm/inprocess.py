"""Generation for many episodes at once, with a model that lives in this process.

Callers are coroutines that each follow one episode and ask for one completion at a time. The engine gathers what is
waiting, runs it as one batch (a *wave*), and keeps the keys and values of each session, so that a turn costs its new
tokens and not its history.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from policy.lm.engine import Completion, ContextFull, EngineFailure, Sampling, UnsupportedModel
from policy.lm.forward import decoder


@dataclass(slots=True)
class _Session:
    """Keys and values of a token sequence, ``[layer, 2, time, head, dim]``; ``ids`` are the tokens they stand for."""

    ids: list[int]
    kv: torch.Tensor | None = None

    def shared_prefix(self, ids: Sequence[int]) -> int:
        """How many leading tokens need no new computation (at least one must be run to get logits)."""
        n = 0
        for mine, new in zip(self.ids, ids[:-1], strict=False):
            if mine != new:
                break
            n += 1
        return n


@dataclass(slots=True)
class _Request:
    ids: list[int]
    sampling: Sampling
    uniforms: np.ndarray  # one per token to sample; drawn from the request's own seed
    session: Hashable | None
    future: asyncio.Future[Completion]


class _WaveCache(Cache):
    """Keys and values of one wave, written at each row's own positions; a view of it is what attention reads."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv  # [layer, 2, row, time, head, dim]
        self.rows = torch.arange(kv.shape[2], device=kv.device)[:, None]
        self.positions = torch.empty(0)
        self.visible = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self.kv[layer_idx]
        stored[0][self.rows, self.positions] = key_states.transpose(1, 2)
        stored[1][self.rows, self.positions] = value_states.transpose(1, 2)
        return stored[0][:, : self.visible].transpose(1, 2), stored[1][:, : self.visible].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible


class InProcessEngine:
    """Runs a transformers causal LM that lives in this process; after an optimiser step it samples the new weights.

    Call ``update_weights`` when the weights changed: cached keys and values belong to the old ones.

    Args:
        model: any decoder of transformers with standard keys and values.
        context: the longest sequence, prompt and completion together.
        batch: how many requests run in one wave; the rest waits.
        cached_tokens: how many tokens all sessions together may keep cached; the oldest session is dropped first and
            recomputed when needed.

    Raises:
        UnsupportedModel: other attention than full attention within ``context``.
    """

    def __init__(self, model: Any, context: int, batch: int = 64, cached_tokens: int = 131072) -> None:
        self.model = model
        self.context = context
        self.batch = batch
        self.cached_tokens = cached_tokens
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None) or context
        if kinds - {"full_attention", "sliding_attention"} or not hasattr(config, "num_key_value_heads"):
            raise UnsupportedModel(f"{config.model_type}: only decoders with standard attention can be played")
        if "sliding_attention" in kinds and window < context:
            raise UnsupportedModel(f"{config.model_type} attends to {window} tokens: lower the context to that")
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._kv_shape = (config.num_hidden_layers, 2, heads, dim)
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._waiting: list[_Request] = []
        self._driver: asyncio.Task[None] | None = None
        self.generated_tokens = 0
        self.version = 0

    def update_weights(self) -> None:
        """Forgets all cached keys and values."""
        self.version += 1
        self._sessions.clear()

    def release(self, session: Hashable) -> None:
        """Frees the cache of an episode that ended."""
        self._sessions.pop(session, None)

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """Continues ``ids``.

        Args:
            ids: the whole sequence so far; what ``session`` has cached of it is not computed again.
            sampling: limits and temperature.
            seed: the only source of chance of this completion.
            session: the episode, as a key for the cache.

        Raises:
            ContextFull: ``len(ids) + max_tokens`` exceeds the context.
            EngineFailure: the logits are not finite.
        """
        if len(ids) + sampling.max_tokens > self.context:
            raise ContextFull(f"{len(ids)} + {sampling.max_tokens} tokens do not fit a context of {self.context}")
        loop = asyncio.get_running_loop()
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens)
        request = _Request(list(ids), sampling, uniforms, session, loop.create_future())
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return await request.future

    async def _drive(self) -> None:
        while self._waiting:
            seen = -1
            while len(self._waiting) != seen and len(self._waiting) < self.batch:
                seen = len(self._waiting)
                for _ in range(3):  # let every coroutine that can still run reach its own request first
                    await asyncio.sleep(0)
            wave, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
            outcomes: Sequence[Completion | Exception]
            try:
                outcomes = self._run_wave(wave)
            except Exception as error:  # raised to this wave's callers; who still waits must not wait for ever
                outcomes = [error] * len(wave)
            for request, outcome in zip(wave, outcomes, strict=True):
                if request.future.done():
                    continue
                if isinstance(outcome, Completion):
                    request.future.set_result(outcome)
                else:
                    request.future.set_exception(outcome)
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _run_wave(self, wave: list[_Request]) -> list[Completion | EngineFailure]:
        """Prefills what is new of every row, then decodes all rows together; finished rows leave the batch."""
        training = self.model.training
        self.model.eval()
        try:
            return self._decode(wave)
        finally:
            self.model.train(training)

    def _decode(self, wave: list[_Request]) -> list[Completion | EngineFailure]:
        device = self.model.device
        sessions = [self._sessions.get(r.session, _Session([])) for r in wave]
        cached = [s.shared_prefix(r.ids) if s.kv is not None else 0 for s, r in zip(sessions, wave, strict=True)]
        capacity = max(len(r.ids) + r.sampling.max_tokens for r in wave)
        layers, two, heads, dim = self._kv_shape
        kv = torch.zeros(layers, two, len(wave), capacity, heads, dim, dtype=self.model.dtype, device=device)
        for row, (session, n) in enumerate(zip(sessions, cached, strict=True)):
            if session.kv is not None:
                kv[:, :, row, :n] = session.kv[:, :, :n]
        cache = _WaveCache(kv)

        new = [torch.tensor(r.ids[n:]) for r, n in zip(wave, cached, strict=True)]
        width = max(len(ids) for ids in new)
        tokens = torch.zeros(len(wave), width, dtype=torch.long)
        positions = torch.empty(len(wave), width, dtype=torch.long)
        for row, ids in enumerate(new):
            tokens[row, : len(ids)] = ids
            # padding writes to the row's last new position onwards; later tokens overwrite it before it is ever read
            positions[row] = cached[row] + torch.arange(width)
        capacity_needed = int(positions.max()) + 1
        if capacity_needed > capacity:
            cache.kv = kv = torch.cat(
                [kv, kv.new_zeros(layers, two, len(wave), capacity_needed - capacity, heads, dim)], 3
            )
        last = torch.tensor([len(ids) - 1 for ids in new])
        logits = self._forward(tokens.to(device), positions.to(device), cache, last.to(device))

        active = list(range(len(wave)))  # which request each row of the working batch serves
        output: list[list[int]] = [[] for _ in wave]
        logprobs: list[list[float]] = [[] for _ in wave]
        failed: set[int] = set()
        temperature = torch.tensor([r.sampling.temperature for r in wave], device=device)
        lengths = torch.tensor([len(r.ids) for r in wave], device=device)
        done = [False] * len(wave)
        kv_of: dict[int, torch.Tensor] = {}
        step = 0
        uniforms = torch.zeros(len(wave), max(r.sampling.max_tokens for r in wave), dtype=torch.float64)
        for row, request in enumerate(wave):
            uniforms[row, : len(request.uniforms)] = torch.from_numpy(request.uniforms)
        uniforms = uniforms.to(device)
        while True:
            chosen, chosen_logprobs = _sample(logits, temperature, uniforms[:, step])
            ids_list, logprob_list = chosen.tolist(), chosen_logprobs.tolist()
            for row, request_index in enumerate(active):
                if done[request_index]:
                    continue
                request = wave[request_index]
                if not np.isfinite(logprob_list[row]):
                    failed.add(request_index)
                    done[request_index] = True
                    continue
                output[request_index].append(ids_list[row])
                logprobs[request_index].append(logprob_list[row])
                if ids_list[row] == request.sampling.stop or len(output[request_index]) == request.sampling.max_tokens:
                    done[request_index] = True
            step += 1
            alive = [row for row, request_index in enumerate(active) if not done[request_index]]
            if not alive:
                break
            if len(alive) <= len(active) // 2:  # a copy of the cache now pays for itself in the steps that follow
                for row, request_index in enumerate(active):
                    if done[request_index]:
                        kv_of[request_index] = cache.kv[:, :, row]
                keep = torch.tensor(alive, device=device)
                cache = _WaveCache(cache.kv.index_select(2, keep))
                temperature, lengths, uniforms, chosen = (x[keep] for x in (temperature, lengths, uniforms, chosen))
                active = [active[row] for row in alive]
            # a finished row runs on in place until the batch is compacted; nobody reads what it writes
            position = torch.minimum(lengths + step - 1, torch.tensor(cache.kv.shape[3] - 1, device=device))
            logits = self._forward(chosen[:, None], position[:, None], cache, None)
        for row, request_index in enumerate(active):
            kv_of[request_index] = cache.kv[:, :, row]

        outcomes: list[Completion | EngineFailure] = []
        for index, request in enumerate(wave):
            if index in failed:
                outcomes.append(EngineFailure("the model's log-probs are not finite"))
                continue
            self.generated_tokens += len(output[index])
            if request.session is not None:
                # the last sampled token was never fed back, so its keys and values do not exist yet
                known = request.ids + output[index][:-1]
                self._keep(request.session, _Session(known, kv_of[index][:, :, : len(known)].clone()))
            stopped = output[index][-1] == request.sampling.stop
            outcomes.append(Completion(tuple(output[index]), tuple(logprobs[index]), stopped, self.version))
        return outcomes

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: _WaveCache, last: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits ``[row, vocab]`` (fp32) after each row's last token; tokens and positions are ``[row, time]``."""
        cache.positions = positions
        cache.visible = int(positions.max()) + 1
        seen = torch.arange(cache.visible, device=positions.device)
        mask = (seen <= positions[:, :, None])[:, None]  # [row, 1, query, key]
        hidden = decoder(self.model)(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        final = hidden[:, -1] if last is None else hidden[torch.arange(len(last), device=last.device), last]
        return self.model.get_output_embeddings()(final).float()

    def _keep(self, key: Hashable, session: _Session) -> None:
        self._sessions.pop(key, None)
        self._sessions[key] = session
        total = sum(len(s.ids) for s in self._sessions.values())
        while total > self.cached_tokens:
            _, dropped = self._sessions.popitem(last=False)
            total -= len(dropped.ids)


def _sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverting the cumulative distribution at the row's own uniform number.

    Args:
        logits: ``[row, vocab]``, fp32.
        temperature: ``[row]``; 0 means greedy.
        uniforms: ``[row]`` in [0, 1).

    Returns:
        ids ``[row]`` and their log-probs ``[row]`` at the sampling temperature (at 1 where greedy).
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    # scaled by the total, so that rounding never leaves the number above the last step
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, logits.argmax(-1), drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]
