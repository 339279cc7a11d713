"""What a loop may spend in the real world: steps, seconds, money. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a loop; 0 is no limit, except of steps.

    Attributes:
        steps: real steps in all.
        seconds: inside real requests.
        price: money.
        step_price: of one real step.
    """

    steps: int
    seconds: float = 0.0
    price: float = 0.0
    step_price: float = 0.0

    def left(self, charged: int, seconds: float = 0.0) -> int:
        """Real steps that may still be taken after ``charged`` of them.

        Example::

            Budget(steps=100, price=5.0, step_price=0.25).left(8)  # 12: money is for 20 steps
        """
        if self.seconds and seconds >= self.seconds:
            return 0
        most = self.steps
        if self.price and self.step_price:
            most = min(most, int(self.price / self.step_price + 1e-9))  # 0.3 / 0.1 is below 3
        return max(0, most - charged)


def wave(waiting: Sequence[str], left: int, longest: int, most: int | None = None) -> dict[str, int]:
    """The next episodes with their turn limits, which are no more than what is left if all are used up.

    So whatever they come to, and in whatever order they end, the budget is not exceeded. What they leave is for the
    next wave.

    Args:
        waiting: ids of the episodes, in order.
        left: real steps.
        longest: turns of an episode.
        most: episodes at a time; by default all.

    Example::

        wave(["a", "b", "c"], left=20, longest=12)  # {"a": 12, "b": 8}
    """
    limits: dict[str, int] = {}
    for name in waiting[:most]:
        if left <= 0:
            break
        limits[name] = min(longest, left)
        left -= limits[name]
    return limits
