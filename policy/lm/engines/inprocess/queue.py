"""Requests of an engine that steps for all of them at once: who waits for a slot, who runs in one, and what is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from policy.lm.engines.inprocess.requests import DeviceScheduler, wait_until_idle
from policy.lm.engines.inprocess.sessions import Sessions


class Asked(Protocol):
    """A request, as far as its place in the queue goes."""

    @property
    def session(self) -> Hashable | None: ...

    @property
    def future(self) -> asyncio.Future[Any]: ...


_Request = TypeVar("_Request", bound=Asked)
_Asked = TypeVar("_Asked", bound=Asked, contravariant=True)


class Stepper(Protocol[_Asked]):
    """What the engine does with requests that have a slot."""

    def begin(self, slot: int, request: _Asked) -> bool:
        """Writes a request into its slot; false where it had better wait a step."""
        ...

    def step(self) -> Mapping[int, Any]:
        """One step for all that run; the results or exceptions of those that are done."""
        ...

    def forget(self, slot: int, error: Exception | None) -> None:
        """A request ended by an error, or was cancelled: its slot holds nothing that anyone may go on from."""
        ...


class SlotQueue(Generic[_Request]):
    """
    Args:
        slots: how many requests run at a time.
        scheduler: shared by engines on the same device.

    Attributes:
        running: the request in each busy slot.
    """

    def __init__(self, slots: int, scheduler: DeviceScheduler | None) -> None:
        self.running: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._sessions = Sessions(slots)
        self._scheduler = scheduler or DeviceScheduler()
        self._scheduler.join(self)
        self._driver: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Requests that wait or run; those that were cancelled do not count."""
        return sum(not r.future.done() for r in (*self._waiting, *self.running.values()))

    def clear(self) -> None:
        """Forgets all sessions.

        Raises:
            RuntimeError: requests are under way; they would go on from keys and values that are no longer theirs.
        """
        if self.load:
            raise RuntimeError(f"{self.load} requests are under way: wait for them or cancel them first")
        self._sessions.clear(self.running)

    def release(self, session: Hashable) -> None:
        """The session will not come back."""
        self._sessions.release(session, self.running)

    async def ask(self, request: _Request, engine: Stepper[_Request]) -> Any:
        """The result of a request; ``engine`` steps until there is one. It is not kept, so that it can be freed."""
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive(engine))
        return await request.future

    async def _drive(self, engine: Stepper[_Request]) -> None:
        while self.load:
            await wait_until_idle(self)
            if not self._scheduler.admits(self):
                continue
            for slot in [slot for slot, request in self.running.items() if request.future.done()]:
                self._finish(engine, slot, None)  # cancelled
            self._admit(engine)
            outcomes: Mapping[int, Any]
            try:
                outcomes = engine.step() if self.running else {}
            except Exception as error:  # raised to those it ran for; who still waits must not wait for ever
                outcomes = dict.fromkeys(self.running, error)
            for slot, outcome in outcomes.items():
                self._finish(engine, slot, outcome)

    def _admit(self, engine: Stepper[_Request]) -> None:
        """Gives waiting requests a slot, in order, as far as there are any."""
        postponed: list[_Request] = []
        while self._waiting:
            request = self._waiting.popleft()
            if request.future.done():  # cancelled
                continue
            slot = self._sessions.find(request.session, self.running)
            if slot is None:
                postponed.append(request)
                break
            if not engine.begin(slot, request):
                postponed.append(request)
                continue
            self._sessions.take(slot, request.session)
            self.running[slot] = request
        self._waiting.extendleft(reversed(postponed))

    def _finish(self, engine: Stepper[_Request], slot: int, outcome: Any) -> None:
        """``outcome``: ``None`` where the request was cancelled."""
        request = self.running.pop(slot)
        error = outcome if isinstance(outcome, Exception) else None
        broken = outcome is None or error is not None
        if broken:
            engine.forget(slot, error)
        self._sessions.leave(slot, request.session, keep=not broken)
        if request.future.done() or outcome is None:
            return
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(outcome)


__all__ = ["SlotQueue", "Stepper"]
