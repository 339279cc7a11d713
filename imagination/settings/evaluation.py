"""Evaluation, audit, comparison and ablation of finished runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from imagination.settings.schema import require


@dataclass
class EvaluateSettings:
    """Evaluation of the policy in the real environment and in dreams."""

    episodes: int = 40  #: per training task, real and dreamed
    heldout_episodes: int = 20  #: per held-out task
    #: training tasks, at most, the first ones; 0 is all. Evaluation plays all held-out tasks; the audit and the
    #: comparison apply the limit to both splits
    tasks: int = 0
    max_turns: int = 12  #: turn limit of an episode
    temperature: float = 1.0  #: of the policy; 0 is greedy

    def __post_init__(self) -> None:
        require(self, "1 or more", "max_turns")


@dataclass
class FewShotSettings:
    """Training in dreams of held-out tasks, given a few logged episodes of each."""

    episodes: int = 20  #: logged episodes per held-out task, at most; their steps are the only real ones
    updates: int = 16  #: policy updates in dreams of these tasks
    #: also train the clone in the real held-out tasks, for about as many real steps as those episodes have
    control: bool = True

    def __post_init__(self) -> None:
        require(self, "1 or more", "episodes", "updates")


@dataclass
class AuditSettings:
    """Metrics of the world model, and the thresholds from which on it is good enough to train in.

    Turn limits and temperatures are those of evaluate and dream.
    """

    world_model: str = "worldmodel"  #: folder under models/ of the one to audit
    #: folders of policies whose ranks in dreams and reality are compared; empty takes those of the run
    policies: list[str] = field(default_factory=list)
    min_policies: int = 10  #: fewer policies are supplemented by other temperatures, which differ less in quality
    #: those other temperatures, in order
    temperatures: list[float] = field(default_factory=lambda: [0.5, 1.5, 0.0, 2.0, 0.75])
    # Chance alone makes a gap: with 120 episodes in each world, 0.05 at a success of one half; with 240, 0.036.
    episodes: int = 40  #: per policy and training task, dreamed and real
    judged: int = 400  #: real episodes whose turns are predicted again, at most, over all policies
    pairs: int = 400  #: of actions of each kind, at most
    least_n: int = 20  #: metrics of fewer turns or episodes than this do not enter the verdict
    #: least share of the planned episodes that all policies have finished; below, their agreement does not enter the
    #: verdict
    min_coverage: float = 0.8
    #: least exact match of next observations, on all held-out turns and on those that no logged episode has
    min_text: float = 0.9
    min_delta: float = 0.93  #: the same for a world model of kind delta
    min_reward: float = 0.95  #: least precision and recall of rewards on the policy's own actions
    max_gap: float = 0.05  #: largest mean absolute difference of dreamed and real success over the policies
    min_spearman: float = 0.9  #: least rank correlation of dreamed and real success
    min_pairwise: float = 0.9  #: least share of dreamed solutions among the real solutions, with the same actions
    #: largest share of dreamed turns that contradict their own dream, by the rules of the log
    max_contradictions: float = 0.02
    max_ece: float = 0.05  #: largest expected calibration error on the policy's own actions
    min_open_loop: float = 0.8  #: least open-loop exact match up to the turn that is called safe
    min_sensitivity: float = 0.9  #: least sensitivity, specificity and recall of refusals
    #: for audit-table, folders of runs; empty takes seeds 0, 1 and 2, which are made where they are missing
    runs: list[str] = field(default_factory=list)
    #: for audit-table without runs, further world models, fitted to the same logs and audited with the same policies: a
    #: name and settings in one text, such as "worldmodel.kind=delta fit.steps=2500"
    others: dict[str, str] = field(default_factory=lambda: {"delta": "worldmodel.kind=delta"})
    #: for audit-table, folders under models/ of each run
    world_models: list[str] = field(default_factory=lambda: ["worldmodel"])

    def __post_init__(self) -> None:
        require(self, "1 or more", "episodes", "judged", "pairs", "least_n")
        if any(temperature < 0 for temperature in self.temperatures):
            raise ValueError(f"temperatures must be 0 or more, got {self.temperatures}")


@dataclass
class CompareSettings:
    """Dreamed and real episodes side by side: with the same actions, and of the same policy in both.

    The policy's dreams are replayed in the real environment where it can be played; logged episodes are dreamed again
    with their own actions, which needs no environment.
    """

    #: folder in models/ of the run, such as policy-clone, or any path; empty compares logged episodes only
    policy: str = "policy"
    episodes: int = 20  #: per task, dreamed and, where the environment can be played, real
    logged: int = 10  #: logged episodes per task, of those that no model was trained on
    splits: list[str] = field(default_factory=list)  #: of tasks; [] takes all
    temperature: float = 1.0  #: of the policy; 0 is greedy
    #: end dreams where the world model is uncertain, as in training; false shows what it would predict
    guard: bool = True
    pairs: int = 3  #: number of pairs on the terminal, those with the earliest difference
    #: also evaluate signals that detect a wrong dreamed turn without the real environment, such as its likelihood
    signals: bool = False
    show: str = ""  #: id of one pair of the last comparison, to print it; nothing is played then


@dataclass
class ListingSettings:
    """The output of `imagine list`."""

    format: Literal["table", "json"] = "table"  #: a table, or json for programs


@dataclass
class AblationSettings:
    """Ablation: each arm trains the same clone in dreams of the same world model, with some settings changed."""

    #: a name and its settings in one text, such as "dream.min_confidence=0 tripwires.enabled=false"; an empty text
    #: changes nothing. ablation=gating and ablation=masks are predefined
    arms: dict[str, str] = field(default_factory=dict)
    #: folders of runs to start from; empty takes seeds 0, 1 and 2 of the demo, made as far as needed
    runs: list[str] = field(default_factory=list)
