"""Is the policy still learning about the world, or about the mistakes of its world model?

``check`` is a pure function of numbers that were measured at each update (``RolloutStats``, see ``rollout_stats``); the
first rule that is broken stops the training.

Episodes of a group start alike and are much alike, so shares are shares of *groups*, with Wilson's interval: a rule is
broken only where its lower limit is beyond the bound, in at least ``min_groups`` groups. Rare and sure evidence (a
dream that the log contradicts, one and the same action that is paid for) is collected over ``memory`` updates, the rest
over ``window``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from imagination.settings import TripwireSettings
from worldmodel.evaluation.intervals import Interval
from worldmodel.evaluation.proportions import Proportion, difference_ci95

PREFIX = "wire_"
BASELINE = 2  # updates: what a policy does before it has learned much


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """The rollouts of one update in numbers; a group are the episodes that count of one start state."""

    update: int  # which, from 0
    episodes: int = 0  # played and not failed
    solved: int = 0  # in the dream
    turns: int = 0  # predictions asked for
    rejected: int = 0  # of them, malformed ones and those that the guard rejected
    inconsistent: int = 0  # dreamed turns that contradict what their own dream said before, by the rules of the log
    groups: int = 0
    paid: int = 0  # groups in which the dream paid anything, in tasks of which the log has episodes
    strange: int = 0  # groups paid an amount that the log never paid, or in total more than it and a solved task
    unseen: int = 0  # groups of ``paid`` with a payment for an action that never paid in the log
    claimed: int = 0  # groups paid for actions, all from the beginning of the task, whose real reward is logged
    contradicted: int = 0  # groups of ``claimed`` with such a payment above the logged reward
    solved_groups: int = 0  # groups solved from the beginning of a task that the log solves often
    short: int = 0  # of them, those with half or more of the solutions far shorter than the log's shortest
    looping: int = 0  # groups with half or more of the episodes in a loop
    silent: int = 0  # groups with half or more of the episodes silent, see ``ActionStats.is_silent``
    diversity: float = 1.0  # distinct actions over those of the log's solutions of these tasks; 1 where not known
    drift_actions: float = 0.0  # distance from the log's words over its bound; 0 where there is none
    drift_observations: float = 0.0
    start_solved: int = 0  # episodes from the beginning of a task
    start_episodes: int = 0
    start_groups: int = 0
    real_solved: int = 0  # of the probe
    real_episodes: int = 0
    # in how many groups of ``paid`` an action, by its text, was paid for that never paid in the log; and, by the word,
    # one with a word that no paying action of that task has: {"take folder": 2, "folder": 3}
    habits: Mapping[str, int] = field(default_factory=dict)

    def to_metrics(self) -> dict[str, float]:
        """The numbers, for ``metrics.jsonl``."""
        return {PREFIX + name: value for name, value in asdict(self).items() if name not in ("update", "habits")}


@dataclass(frozen=True, slots=True)
class Alert:
    """Why training stops."""

    update: int  # whose rollouts broke the rule; nothing was learned from them
    since: int  # the first update of the evidence, of all rules broken; its policy has learned from none of it
    wire: str  # the rule's name; this key is on disk
    sentence: str  # what was seen, with numbers


# Since which update the evidence counts, and the sentence. A rule that adds up groups counts since the earliest update
# of its window that has such a group; one that compares a whole window, since the first update of the window.
Evidence = tuple[int, str]
Rule = Callable[[Sequence[RolloutStats], TripwireSettings], Evidence | None]


def check(history: Sequence[RolloutStats], settings: TripwireSettings) -> Alert | None:
    """Whether the last update of the history breaks a rule; the first of ``RULES`` that it breaks."""
    if not settings.enabled or not history:
        return None
    broken = {name: evidence for name, rule in RULES.items() if (evidence := rule(history, settings)) is not None}
    if not broken:
        return None
    name, (_, sentence) = next(iter(broken.items()))
    return Alert(history[-1].update, min(since for since, _ in broken.values()), name, sentence)


def first_trip(history: Sequence[RolloutStats], settings: TripwireSettings) -> Alert | None:
    """The earliest alert of a whole history."""
    alerts = (check(history[: n + 1], settings) for n in range(len(history)))
    return next((alert for alert in alerts if alert is not None), None)


def stopped_sentence(stopped: Mapping[str, Any]) -> str:
    """Why training stopped, or was taken back after its last update, and to which policy; in one sentence."""
    example = f", such as '{stopped['example']}'" if stopped.get("example") else ""
    tripped = f"tripwire '{stopped['wire']}': {stopped['sentence']}{example}"
    policy_of, since = stopped.get("policy_of_update"), stopped.get("since")
    back = f"the policy that played update {policy_of}" if policy_of else "the policy it started with"
    if since is None:  # a run of an earlier version, which trusted every policy but the last
        why = f"it went back to {back}, whose dreams were the last to be trusted"
    else:
        why = f"the evidence counts since update {since}, so it went back to {back}, which had learned from none of it"
    if stopped.get("after_training"):
        return f"The policy that training ended with was taken back by {tripped}; {why}."
    return f"Training stopped at update {stopped['update']} by {tripped}; {why}."


def _sum(window: Sequence[RolloutStats], name: str) -> int:
    return sum(getattr(stats, name) for stats in window)


def _change(
    history: Sequence[RolloutStats], window: Sequence[RolloutStats], part: str, whole: str
) -> tuple[Proportion, Proportion, Interval | None]:
    """A share in the first updates and in the window, and the interval of its rise."""
    before, now = (Proportion(_sum(some, part), _sum(some, whole)) for some in (history[:BASELINE], window))
    return before, now, difference_ci95(now, before)


def _surely(part: int, whole: int, bound: float, settings: TripwireSettings) -> Proportion | None:
    """``part`` of ``whole`` groups, if they are enough and surely a larger share than ``bound``."""
    share = Proportion(part, whole)
    return share if part >= settings.min_groups and share.ci95 is not None and share.ci95[0] > bound else None


def _share(
    window: Sequence[RolloutStats], part: str, whole: str, bound: float, settings: TripwireSettings
) -> tuple[int, str] | None:
    """``_surely`` of the sums over a window, as ``3 of 12``, with the first update that adds to ``part``. Nothing where
    the newest adds nothing: old evidence was weighed when it was new."""
    if getattr(window[-1], part) == 0:
        return None
    share = _surely(_sum(window, part), _sum(window, whole), bound, settings)
    if share is None:
        return None
    return next(stats.update for stats in window if getattr(stats, part)), f"{share.successes} of {share.n}"


def _groups(part: str, whole: str, last: str, bound: str | None, sentence: str) -> Rule:
    """A share of groups, added up over the setting ``last``, is surely larger than the setting ``bound``, or 0."""

    def rule(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
        largest = 0.0 if bound is None else getattr(settings, bound)
        evidence = _share(history[-getattr(settings, last) :], part, whole, largest, settings)
        return None if evidence is None else (evidence[0], sentence.format(share=evidence[1]))

    return rule


def _risen(field: str, what: str) -> Rule:
    """A share of turns has surely risen by more than the setting of the same name since the first updates."""

    def rule(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
        if len(history) < BASELINE + settings.window:
            return None
        window = history[-settings.window :]
        before, now, rise = _change(history, window, field, "turns")
        if rise is None or rise[0] <= getattr(settings, field):
            return None
        return window[0].update, (
            f"the share of {what} rose from {before.rate:.2f} to {now.rate:.2f}, so the policy goes where the world "
            "model knows little"
        )

    return rule


def _drift(field: str, what: str) -> Rule:
    """Words are farther from the log than any of its agents is, in every update of a window."""

    def rule(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
        window = history[-settings.window :]
        recent = [getattr(stats, field) for stats in window]
        if len(recent) < settings.window or min(recent) <= settings.drift:
            return None
        return window[0].update, (
            f"the words of {what} are {recent[-1]:.1f} times as far from the log as any agent of the log is, "
            f"and were for {len(recent)} updates"
        )

    return rule


def _favourite(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
    """One and the same action or word is paid for that never paid in the log."""
    window = history[-settings.memory :]
    counts: Counter[str] = Counter()
    for stats in window:
        counts.update(stats.habits)
    paid = _sum(window, "paid")
    sure = {
        action: share
        for action, n in counts.items()
        if action in history[-1].habits and (share := _surely(n, paid, settings.favourite, settings)) is not None
    }
    if not sure:
        return None
    since = next(stats.update for stats in window if sure.keys() & stats.habits.keys())
    action, share = max(sure.items(), key=lambda item: (item[1].successes, len(item[0]), item[0]))  # says most
    groups = f"{share.successes} of {share.n} groups that the dream pays"
    return since, f"'{action}', which its task never paid in the log, is paid for in {groups}"


def _short(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
    """Reward up while episodes collapse: success must have risen beyond chance since the first updates."""
    evidence = _share(history[-settings.window :], "short", "solved_groups", 0.5, settings)
    if evidence is None or len(history) <= BASELINE:
        return None
    before, now, rise = _change(history, history[-settings.window :], "solved", "episodes")
    if rise is None or rise[0] <= 0:
        return None
    return evidence[0], (
        f"dreamed success rises ({before.rate:.2f} to {now.rate:.2f}) while {evidence[1]} groups are solved in fewer "
        f"than {settings.short:g} times the turns of the log's shortest solution"
    )


def _gap(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
    """Only right after a probe. Dreams count as so many groups, not episodes, for the width of the interval."""
    last, window = history[-1], history[-settings.window :]
    groups, episodes = _sum(window, "start_groups"), _sum(window, "start_episodes")
    if last.real_episodes == 0 or not episodes:
        return None
    dreamed = Proportion(round(groups * _sum(window, "start_solved") / episodes), groups)
    real = Proportion(_sum(window, "real_solved"), _sum(window, "real_episodes"))
    gap = difference_ci95(dreamed, real)
    if gap is None or gap[0] <= settings.gap:
        return None
    return window[0].update, (
        f"the dream believes in a success of {dreamed.rate:.2f} where {real.n} real episodes show {real.rate:.2f}, "
        f"beyond the allowed {settings.gap:g} (95 % interval of the gap {gap[0]:.2f} to {gap[1]:.2f})"
    )


def _silent(history: Sequence[RolloutStats], settings: TripwireSettings) -> Evidence | None:
    """Actions collapse: most say nothing, or few different ones are left while the dream pays as before."""
    window = history[-settings.window :]
    evidence = _share(window, "silent", "groups", settings.silent, settings)
    if evidence is not None:
        since, share = evidence
        return since, f"the policy hardly acts: actions are empty, repeated or cut short in {share} groups"
    if len(history) < BASELINE + settings.window or max(stats.diversity for stats in window) >= settings.diversity:
        return None
    before, now, change = _change(history, window, "solved", "episodes")
    if change is None or change[1] < 0:  # a dream that pays less is no reason to do less
        return None
    return window[0].update, (
        f"the policy has {window[-1].diversity:.2f} times the different actions of the log's solutions, for "
        f"{len(window)} updates, while dreamed success holds ({before.rate:.2f} to {now.rate:.2f})"
    )


# The surest evidence first: the sentence that is shown is that of the first rule that is broken.
RULES: Mapping[str, Rule] = {
    "gap": _gap,
    "contradicted": _groups(
        "contradicted",
        "claimed",
        "memory",
        "contradicted",
        "the dream pays where the log says that the same actions earn less, in {share} groups in which both know the "
        "answer",
    ),
    "strange": _groups(
        "strange", "groups", "window", None, "the dream pays amounts that the log never paid, in {share} groups"
    ),
    "favourite": _favourite,
    "unseen": _groups(
        "unseen",
        "paid",
        "window",
        "unseen",
        "the dream pays for actions that their tasks never paid in the log, in {share} groups that it pays",
    ),
    "short": _short,
    "loops": _groups("looping", "groups", "window", "loops", "episodes repeat themselves in {share} groups"),
    "silent": _silent,
    "rejected": _risen("rejected", "predictions that are malformed or doubted"),
    "inconsistent": _risen("inconsistent", "turns that contradict their own dream"),
    "drift_actions": _drift("drift_actions", "the policy's actions"),
    "drift_observations": _drift("drift_observations", "the dreamed observations"),
}
