"""What only looks at a run, or starts others from it: evaluation, audit, comparison, ablation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class EvaluateSettings:
    """The verdict in the real games.

    Attributes:
        episodes: per training game, real and dreamed.
        heldout_episodes: per held-out game.
        tasks: at most so many of the training games, the first ones; 0 is all. All held-out games are played; the audit
            and the comparison take no more than so many of a split, either.
        max_turns: at which an episode counts as lost.
        temperature: at which the policy plays; 0 is greedy.
    """

    episodes: int = 40
    heldout_episodes: int = 20
    tasks: int = 0
    max_turns: int = 12
    temperature: float = 1.0


@dataclass
class FewShotSettings:
    """Dreams of tasks that no model was fitted to, known by a few logged episodes.

    Attributes:
        episodes: at most so many of each held-out task; what they took is all the real steps that are spent.
        updates: of the policy in dreams of these tasks.
        control: also train the clone in the real held-out tasks, by about as many real steps as the episodes took.
    """

    episodes: int = 20
    updates: int = 16
    control: bool = True

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.updates < 1:
            raise ValueError("few_shot.episodes and few_shot.updates must be at least 1")


@dataclass
class AuditSettings:
    """Is the world model good enough to dream in? What is measured, and from where on it is good enough.

    The horizon, the temperature of policies and that of dreams are those of evaluate and dream.

    Attributes:
        world_model: folder under models/ of the one to audit.
        policies: folders of policies whose ranks in dream and reality are compared; none takes those of the run.
        min_policies: fewer than this are filled up with other temperatures, which differ less in quality.
        temperatures: those other temperatures, in the order in which they are taken.
        episodes: per policy and training game, in the dream and for real.
        judged: most real episodes of all policies together that are judged turn by turn.
        pairs: most pairs of actions of each kind.
        least_n: fewer turns or episodes than this decide nothing in the verdict.
        min_coverage: least share of the planned episodes that all policies must have finished, or nothing is said of
            their agreement.
        min_text: least share of next observations that are right, of all held-out turns and of those among them that
            no logged episode has.
        min_delta: the same for a world model that writes edits.
        min_reward: least precision and recall of rewards on the policy's own actions.
        max_gap: largest mean absolute difference of dreamed and real success over the policies.
        min_spearman: least rank correlation of dreamed and real success.
        min_pairwise: least share of really solved episodes that the dreamed actions solve too.
        max_contradictions: largest share of dreamed turns that contradict their own dream, by the rules of the log.
        max_ece: largest expected calibration error on the policy's own actions.
        min_open_loop: least open-loop exact match up to the turn that is called safe.
        min_sensitivity: least sensitivity, specificity and share of refusals that it refuses too.
        runs: for audit-table, folders of runs; none takes seeds 0, 1 and 2, which are made where they are missing.
        others: for audit-table without runs, further world models that are fitted to the same logs and audited with the
            same policies: a name and settings in one text, such as "worldmodel.kind=delta fit.steps=2500".
        world_models: for audit-table, folders under models/ of each run.
    """

    world_model: str = "worldmodel"
    policies: list[str] = field(default_factory=list)
    min_policies: int = 10
    temperatures: list[float] = field(default_factory=lambda: [0.5, 1.5, 0.0, 2.0, 0.75])
    # Chance alone makes a gap: with 120 episodes in each world, 0.05 at a success of one half; with 240, 0.036.
    episodes: int = 40
    judged: int = 400
    pairs: int = 400
    least_n: int = 20
    min_coverage: float = 0.8
    min_text: float = 0.9
    min_delta: float = 0.93
    min_reward: float = 0.95
    max_gap: float = 0.05
    min_spearman: float = 0.9
    min_pairwise: float = 0.9
    max_contradictions: float = 0.02
    max_ece: float = 0.05
    min_open_loop: float = 0.8
    min_sensitivity: float = 0.9
    runs: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=lambda: {"delta": "worldmodel.kind=delta"})
    world_models: list[str] = field(default_factory=lambda: ["worldmodel"])


@dataclass
class CompareSettings:
    """Dreams beside reality: the same actions in both worlds, and the same policy free in both.

    The policy's dreams are replayed for real, where this program can play the run's world; logged episodes are dreamed
    again with their own actions, which needs no world at all.

    Attributes:
        policy: folder in models/ of the run, such as policy-clone, or any path; empty compares logged episodes only.
        episodes: per task, dreamed and, where the world can be played, real.
        logged: per task, of those that no model was trained on.
        splits: of tasks; [] takes all that there are.
        temperature: at which the policy plays; 0 is greedy.
        guard: end dreams where the world model is unsure, as in training; false shows what it would go on to say.
        pairs: that the terminal shows, those that part earliest.
        signals: also judge what tells a false turn of a dream without the real world, such as its likelihood.
        show: id of one pair of the last comparison, to print it; nothing is played then.
    """

    policy: str = "policy"
    episodes: int = 20
    logged: int = 10
    splits: list[str] = field(default_factory=list)
    temperature: float = 1.0
    guard: bool = True
    pairs: int = 3
    signals: bool = False
    show: str = ""


@dataclass
class ListingSettings:
    """What `imagine list` prints.

    Attributes:
        format: a table, or json for programs.
    """

    format: Literal["table", "json"] = "table"


@dataclass
class AblationSettings:
    """What if? Each arm trains the same clone in dreams of the same world model, with some settings changed.

    Attributes:
        arms: a name and its settings in one text, such as "dream.min_confidence=0 tripwires.enabled=false"; an empty
            text is the run as it is. ablation=gating and ablation=masks are ready.
        runs: folders of runs to start from; empty: seeds 0, 1 and 2 of the demo, made as far as needed.
    """

    arms: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
