"""Which slot of an engine belongs to which session, and which slots are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable


class Sessions:
    """Slots ``0 .. slots - 1``; ``busy`` are always those in which a request runs.

    A session keeps its slot between requests, until it is released or another one needs it more recently.
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
        """The session will not come back."""
        slot = self._slot_of.pop(session, None)
        if slot is not None and slot not in busy:
            self._free.add(slot)

    def find(self, session: Hashable | None, busy: Collection[int]) -> int | None:
        """Where a request may run: in its session's slot, a free one, or that of the session longest idle."""
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
        """A request of ``session`` starts in ``slot``, which ``find`` gave."""
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


__all__ = ["Sessions"]
