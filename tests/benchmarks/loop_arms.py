"""The ways to spend real steps that ``make loop-table`` compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Arm:
    """One way.

    Attributes:
        kind: ``real`` trains in the real games alone; ``loop`` is ``imagine loop``.
        settings: overrides of the table's.
        begins: with which policy and, for ``loop``, after what: ``clone``, or ``dreams``, the round of dreams from the
            log that the arms of a seed have in common.
    """

    name: str
    title: str
    kind: Literal["real", "loop"] = "loop"
    settings: tuple[str, ...] = ()
    begins: Literal["clone", "dreams"] = "dreams"


REAL_ONLY = ("real-only", "real-only-small")  # the better of these is what others are compared with
DREAMS = Arm("dreams", "dreams from the log only", settings=("loop.budget=0",), begins="clone")
ARMS = (
    Arm("real-only", "real only, 72 episodes an update", "real", ("train.updates=16",), "clone"),
    Arm(
        "real-only-small",
        "real only, 24 episodes an update",
        "real",
        ("train.groups=4", "train.group_size=6", "train.minibatches=1", "train.updates=36", "train.keep_every=9"),
        "clone",
    ),
    DREAMS,
    Arm("dream-then-real", "dreams, then real only", "real", ("train.updates=12",)),
    Arm("loop", "the loop"),
    Arm("uniform", "the loop, tasks at random", settings=("loop.choice=uniform",)),
    Arm("frozen", "the loop, world model frozen", settings=("loop.fit_steps=0",)),
    Arm("fit-only", "the loop, real episodes only fitted to", settings=("loop.real_share=0",)),
    Arm("share-20", "the loop, a fifth real", settings=("loop.real_share=0.2",)),
    Arm("share-80", "the loop, four fifths real", settings=("loop.real_share=0.8",)),
    Arm("audited", "the loop, dreams as long as true", settings=("loop.horizon=audited",)),
    Arm(
        "no-guard",
        "the loop, neither guard nor tripwires",
        settings=("dream.min_confidence=0", "dream.min_outcome_confidence=0", "tripwires.enabled=false"),
        begins="clone",
    ),
    Arm("no-expert", "the loop, no expert episodes", settings=("train.expert_share=0",), begins="clone"),
    Arm("imitation", "the loop, best episodes imitated", settings=("algorithm.name=filtered_bc",), begins="clone"),
)
