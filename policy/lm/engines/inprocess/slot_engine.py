"""The base of engines in this process: their slots, the requests that wait or run in them, and whose turn it is.

Every session (episode) keeps a slot with its token ids and their keys and values between requests. One asyncio task
steps the engine for all running requests at once; callers wait for their own results.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet, ref

import numpy as np
import torch

from policy.lm.engine import EngineCounts, EngineFailure
from policy.lm.engines.inprocess.decode import kv_shape, make_decoder
from policy.lm.settings import EngineSettings
from real_envs.errors import UserError

WORTH_COPYING = 16  # tokens of a common prefix from which on keys and values are copied between slots


class MemoryTooSmall(UserError):
    """Not even one sequence of the whole context fits the stated memory."""


class Scheduled(Protocol):
    """An engine with requests that wait."""

    @property
    def load(self) -> int: ...


class DeviceScheduler:
    """Where several engines share one device, the one with most requests steps, until another has more.

    In a dream, policy and world model alternate; without this each would run half-empty batches. Cancelled or lost
    requests must not count, or others would wait for them for ever.

    Args:
        stay: an engine steps until another has more than so many times its requests. With 1, episodes fall into two
            halves that take turns; with 8 they stay together, which is faster where a step costs the same however few
            slots it is for, as CUDA graphs do.
    """

    def __init__(self, stay: int = 1) -> None:
        self._engines: WeakSet[Scheduled] = WeakSet()
        self._stay = stay
        self._stepping: Callable[[], Scheduled | None] = lambda: None  # a weak reference

    def join(self, engine: Scheduled) -> None:
        self._engines.add(engine)

    def admits(self, engine: Scheduled) -> bool:
        stepping, most = self._stepping(), max(other.load for other in self._engines)
        if stepping is not None and self._stay * stepping.load >= most:
            return engine is stepping
        if engine.load == most:
            self._stepping = ref(engine)
        return engine.load == most


async def wait_until_idle(engine: Scheduled) -> None:
    """Returns when every coroutine that can run has made its request."""
    seen = -1
    while engine.load != seen:
        seen = engine.load
        for _ in range(3):
            await asyncio.sleep(0)


class SessionSlots:
    """Which slot belongs to which session. ``busy`` are always the slots in which a request runs.

    A session keeps its slot between requests until it is released, or evicted as the least recently used one.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._slot_of: OrderedDict[Hashable, int] = OrderedDict()  # the session least recently used comes first
        self._free = set(range(slots))

    def clear(self, busy: Collection[int]) -> None:
        """Forgets all sessions."""
        self._slot_of.clear()
        self._free = set(range(self._slots)) - set(busy)

    def release(self, session: Hashable, busy: Collection[int]) -> None:
        """The session is over."""
        slot = self._slot_of.pop(session, None)
        if slot is not None and slot not in busy:
            self._free.add(slot)

    def find(self, session: Hashable | None, busy: Collection[int]) -> int | None:
        """A slot for a request: its session's, a free one, or that of the least recently used session."""
        slot = self._slot_of.get(session) if session is not None else None
        if slot is not None and slot not in busy:
            self._slot_of.move_to_end(session)
            return slot
        if self._free:
            return min(self._free)  # neighbours: attention reads them in place
        for other, idle in self._slot_of.items():
            if idle not in busy:
                del self._slot_of[other]
                self._free.add(idle)
                return idle
        return None

    def take(self, slot: int, session: Hashable | None) -> None:
        """A request of ``session`` starts in ``slot``, which ``find`` returned."""
        self._free.discard(slot)
        if session is not None and session not in self._slot_of:
            self._slot_of[session] = slot

    def leave(self, slot: int, session: Hashable | None, keep: bool) -> None:
        """The request is over; ``keep`` its slot for the session, if it is that session's."""
        if self._slot_of.get(session) == slot:
            if keep:
                return
            del self._slot_of[session]
        self._free.add(slot)


class SlotRequest(Protocol):
    """A request, as far as its place in the queue goes."""

    @property
    def session(self) -> Hashable | None: ...

    @property
    def future(self) -> asyncio.Future[Any]: ...


_Request = TypeVar("_Request", bound=SlotRequest)


class SlotEngine(ABC, Generic[_Request]):
    """An ``Engine`` over a transformers causal LM in this process; subclasses say what a step is.

    Args:
        model: a decoder of transformers; ``decode.make_decoder`` says which ones.
        context: the longest sequence, prompt and completion together.
        settings: slots (there are fewer where memory_gib is too small for them), memory_gib and dtype.
        scheduler: shared by engines on the same device.

    Raises:
        UnsupportedModel: other attention than full attention within ``context``.
        MemoryTooSmall: not even one slot fits ``memory_gib``.
    """

    def __init__(
        self, model: Any, context: int, settings: EngineSettings | None, scheduler: DeviceScheduler | None
    ) -> None:
        settings = settings or EngineSettings()
        dtype = model.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self.model, self.context = model, context
        self.version, self.counts = 0, EngineCounts()
        self.exact = dtype == model.dtype == torch.float32
        self.slots = _affordable_slots(model.config, context, settings, dtype)
        graphs = settings.graphs and model.device.type == "cuda"
        self._decoder = make_decoder(model, context, self.slots, dtype, graphs)
        self._stale = True
        self._ids = np.zeros((self.slots, context), dtype=np.int64)
        self._fed = np.zeros(self.slots, dtype=np.int64)  # keys and values of a slot exist up to here
        self._running: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._sessions = SessionSlots(self.slots)
        self._scheduler = scheduler or DeviceScheduler()
        self._scheduler.join(self)
        self._driver: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Requests that wait or run; cancelled ones do not count."""
        return sum(not r.future.done() for r in (*self._waiting, *self._running.values()))

    def update_weights(self) -> None:
        """See ``Engine``. Call it between rollouts, after the model's weights changed.

        Raises:
            RuntimeError: requests are under way.
        """
        self.reset()
        self.version += 1
        self._stale = True

    def reset(self) -> None:
        """See ``Engine``: a seed decides a text without this only up to rounding, which differs from batch to batch.

        Raises:
            RuntimeError: requests are under way.
        """
        if self.load:
            raise RuntimeError(f"{self.load} requests are under way: wait for them or cancel them first")
        self._sessions.clear(self._running)
        self._fed[:] = 0

    def release(self, session: Hashable) -> None:
        """See ``Engine``."""
        self._sessions.release(session, self._running)

    @abstractmethod
    def _begin(self, slot: int, request: _Request) -> bool:
        """Writes a request into its slot; false where it should wait for another step."""

    @abstractmethod
    def _step(self) -> Mapping[int, Any]:
        """One step for all running requests; returns the results or exceptions of finished ones by slot."""

    def _take_over(self, slot: int, ids: np.ndarray, common: np.ndarray) -> None:
        """Writes a text into a slot with what is cached of it, there or in the slot that has much more of it.

        Args:
            common: leading ids of which each slot has keys and values.
        """
        donor, cached = int(common.argmax()), int(common[slot])
        if common[donor] >= cached + WORTH_COPYING:
            cached = int(common[donor])
            self._decoder.cache.copy(donor, slot, cached)
        self._ids[slot, : len(ids)] = ids
        self._fed[slot] = cached
        self.counts.reused += cached

    async def _ask(self, request: _Request) -> Any:
        """The result of a request."""
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await request.future

    async def _drive(self) -> None:
        while self.load:
            await wait_until_idle(self)
            if not self._scheduler.admits(self):
                continue
            for slot in [slot for slot, request in self._running.items() if request.future.done()]:
                self._finish(slot, None)  # cancelled
            self._admit()
            outcomes: Mapping[int, Any] = {}
            try:
                if self._running:
                    outcomes = self._refreshed_step()
            except Exception as error:  # raised to the running requests; waiting ones must not wait for ever
                outcomes = dict.fromkeys(self._running, error)
            for slot, outcome in outcomes.items():
                self._finish(slot, outcome)

    @torch.inference_mode()
    def _refreshed_step(self) -> Mapping[int, Any]:
        if self._stale:
            self._decoder.refresh()
            self._stale = False
        return self._step()

    def _admit(self) -> None:
        """Gives waiting requests a slot, in order, as far as there are any."""
        postponed: list[_Request] = []
        while self._waiting:
            request = self._waiting.popleft()
            if request.future.done():  # cancelled
                continue
            slot = self._sessions.find(request.session, self._running)
            if slot is None:
                postponed.append(request)
                break
            if not self._begin(slot, request):
                postponed.append(request)
                continue
            self._sessions.take(slot, request.session)
            self._running[slot] = request
        self._waiting.extendleft(reversed(postponed))

    def _finish(self, slot: int, outcome: Any) -> None:
        """Resolves a request; ``outcome`` is ``None`` where it was cancelled."""
        request = self._running.pop(slot)
        error = outcome if isinstance(outcome, Exception) else None
        broken = outcome is None or error is not None
        if broken:
            self._fed[slot] = 0
        if isinstance(error, EngineFailure):
            self._decoder.cache.clear(slot)  # broken numbers leave NaN in the slot
        self._sessions.leave(slot, request.session, keep=not broken)
        if request.future.done() or outcome is None:
            return
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(outcome)


def _affordable_slots(config: Any, context: int, settings: EngineSettings, dtype: torch.dtype) -> int:
    """How many sequences are kept: ``slots``, or as many as have room for their keys and values."""
    layers, heads, dim = kv_shape(config)
    per_slot = layers * 2 * heads * dim * (context + 1) * torch.empty((), dtype=dtype).element_size()
    affordable = int(settings.memory_gib * 2**30 / per_slot)
    if affordable < 1:
        raise MemoryTooSmall(
            f"engine.memory_gib={settings.memory_gib}: one sequence of {context} tokens needs {per_slot / 2**30:.2f} "
            "GiB of keys and values: lower the context or raise the budget"
        )
    return min(settings.slots, affordable)


def common_prefix(known: np.ndarray, limits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """How many leading ids each row of ``known`` shares with ``ids``, at most ``limits``: ``[row]``."""
    n = min(len(ids), int(np.max(limits)))
    if n == 0:
        return np.zeros(len(known), dtype=np.int64)
    same = known[:, :n] == ids[:n]
    return np.minimum(np.where(same.all(1), n, same.argmin(1)), limits)


def within(counts: np.ndarray, budget: int) -> np.ndarray:
    """How much of each block fits ``budget``, short blocks first."""
    if counts.sum() <= budget:
        return counts
    order = np.argsort(counts, kind="stable")
    ranked = counts[order]
    out = np.empty_like(counts)
    out[order] = np.clip(budget - (np.cumsum(ranked) - ranked), 0, ranked)
    return out
