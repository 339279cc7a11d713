"""From the numbers of an audit to targets met and missed, and to sentences that say what may be dreamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagination.settings import AuditSettings
from worldmodel.evaluation.dreams import horizon
from worldmodel.evaluation.proportions import count, interval, number, signed

HEADLINES = {
    "yes": "Good enough to dream in: every target is met.",
    "partly": "Dream in it with care: {missed} of {n} targets are missed.",
    "no": "Do not rely on dreams in it: {missed} of {n} targets are missed.",
    "unknown": "Nothing was measured that could decide whether to dream in it.",
}
NOTHING: Mapping[str, Any] = {"value": None, "n": 0, "ci95": None}


def targets(audit: Mapping[str, Any], settings: AuditSettings) -> list[dict[str, Any]]:
    """What was asked of the world model and whether it holds; ``met`` is null where it was not measured, or on too few
    turns, policies or episodes to say."""
    held, own = audit["sets"].get("held_out", {}), audit["sets"].get("on_policy", {})
    plain = audit["agreement"].get("plain", {})
    reward, new, whole = own.get("reward", {}), held.get("new", {}), own.get("calibration", {}).get("whole", {})
    least = settings.min_delta if audit["world_model"].get("kind") == "delta" else settings.min_text
    rows = [
        ("text", "Next observation right, held-out turns", ">=", least, held.get("text")),
        ("text_new", "Next observation right, held-out turns not in the log", ">=", least, new.get("text")),
        ("reward_precision", "Reward precision, own actions", ">=", settings.min_reward, reward.get("precision")),
        ("reward_recall", "Reward recall, own actions", ">=", settings.min_reward, reward.get("recall")),
        ("gap", "Mean absolute optimism gap", "<=", settings.max_gap, plain.get("mean_absolute_gap")),
        ("spearman", "Rank agreement (Spearman)", ">=", settings.min_spearman, plain.get("spearman")),
        ("cr_pairwise", "Pairwise consistency (CR_pw)", ">=", settings.min_pairwise, plain.get("cr_pairwise")),
        ("ece", "Calibration error, own actions", "<=", settings.max_ece, whole.get("ece")),
    ]
    if "contradictions" in audit:  # audits of runs without rules have none
        title, rate = "Dreamed turns that contradict their dream", audit["contradictions"]["rate"]
        rows.append(("contradictions", title, "<=", settings.max_contradictions, rate))
    return [
        {
            "key": key,
            "title": title,
            "bound": bound,
            "target": target,
            "estimate": dict(estimate or NOTHING),
            "met": _met(key, bound, target, estimate or NOTHING, audit, settings),
        }
        for key, title, bound, target, estimate in rows
    ]


def _met(
    key: str, bound: str, target: float, estimate: Mapping[str, Any], audit: Mapping[str, Any], settings: AuditSettings
) -> bool | None:
    few_each = False  # episodes of each policy
    if key in ("gap", "spearman", "cr_pairwise"):
        plain = audit["agreement"].get("plain")
        few = plain is None or plain["policies"] < settings.min_policies
        if few or plain["episodes_each"] < settings.min_coverage * plain["planned"]:
            return None
        few_each = plain["episodes_each"] < settings.least_n
    if key == "spearman":
        dreamed, real = ({p[side]["value"] for p in audit["policies"]} - {None} for side in ("dream", "real"))
        if len(dreamed) == 1 < len(real):  # all fare alike in the dream only: no rank correlation is defined
            return False
    value = estimate["value"]
    # of gaps and ranks n is the number of policies
    if value is None or (key not in ("gap", "spearman") and estimate["n"] < settings.least_n):
        return None
    met = bool(value >= target if bound == ">=" else value <= target)
    low, high = estimate["ci95"] or (target, target)
    if few_each and (met or low <= target <= high):
        return None  # only what is surely missed counts
    return met


def verdict(audit: Mapping[str, Any], settings: AuditSettings) -> dict[str, Any]:
    """``{"trust": .., "sentences": [...]}``; the first sentence is the headline, each further one gives a reason.

    ``yes``: every target that was measured is met, those in the real environment among them. ``no``: half of them or
    more are missed, or the dream ranks policies wrongly. ``partly``: else. ``unknown``: nothing was measured.
    """
    rows = targets(audit, settings)
    measured = [row for row in rows if row["met"] is not None]
    missed = [row for row in measured if not row["met"]]
    if not measured:
        trust = "unknown"
    elif not missed and len(measured) == len(rows):
        trust = "yes"
    elif 2 * len(missed) >= len(measured) or any(row["key"] == "spearman" for row in missed):
        trust = "no"
    else:
        trust = "partly"
    headline = HEADLINES[trust].format(missed=len(missed), n=len(measured))
    if trust == "partly" and not missed:
        headline = "What was measured is good enough, but not everything was measured."
    reasons = [
        *(
            f"{row['title']}: {show(row['estimate'], digits=digits_of(row))}, wanted "
            f"{'at least' if row['bound'] == '>=' else 'at most'} {row['target']:g}{_perhaps_chance(row)}."
            for row in missed
        ),
        *_horizon(audit, settings),
        *_rewards(audit, settings),
        *_confidence(audit, settings),
        *_refusals(audit, settings),
        *_sensitivity(audit, settings),
        *_contradictions(audit),
        *_users(audit),
        *_optimism(audit),
        *_worst(audit),
    ]
    unmeasured = [row["title"] for row in rows if row["met"] is None]
    if unmeasured:
        reasons.append(f"Not measured, or on too little to say: {'; '.join(unmeasured)}.")
    return {"trust": trust, "sentences": [headline, *reasons]}


def show(estimate: Mapping[str, Any], *, sign: bool = False, digits: int = 2) -> str:
    """``0.61 [0.43, 0.76], n=31``; ``none, n=10`` where there is no value."""
    if estimate["value"] is None:
        return f"none, n={estimate['n']:,}"
    value = signed(estimate["value"]) if sign else number(estimate["value"], digits)
    between = interval(estimate["ci95"], with_sign=sign)
    return f"{value} {between}, n={estimate['n']:,}" if between else f"{value}, n={estimate['n']:,}"


def digits_of(row: Mapping[str, Any]) -> int:
    """Two, or more where a missed target would look met: 0.052 is not at most 0.05."""
    value = row["estimate"]["value"]
    return next((n for n in (2, 3) if number(value, n) != number(row["target"], n)), 4)


def _perhaps_chance(row: Mapping[str, Any]) -> str:
    """Says so where the interval reaches over the target."""
    ci95 = row["estimate"]["ci95"]
    return " (chance may explain it)" if ci95 and ci95[0] <= row["target"] <= ci95[1] else ""


def _horizon(audit: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    sentences = []
    for name, where in (("on_policy", "the policy's own actions"), ("held_out", "logged actions")):
        drift = audit["sets"].get(name, {}).get("drift")
        if not drift or not drift["n"]:
            continue
        if drift["n"] < settings.least_n:
            sentences.append(f"Along {where} no horizon is known: there are fewer than {settings.least_n} episodes.")
            continue
        safe, at = horizon(drift, settings.min_open_loop, settings.least_n), drift["exact_at"]
        after = at.get(str(safe + 1))
        then = "" if after is None else f"; at turn {safe + 1} it is {show(after)}"
        if after is not None and after["n"] < settings.least_n:
            then = f"; beyond that there are fewer than {settings.least_n} episodes"
        until = f"open-loop exact match stays at or above {settings.min_open_loop:g} until turn {safe}"
        sentences.append(
            f"Along {where}, dream up to {count(safe, 'turn')}: {until} ({show(at[str(safe)])}){then}."
            if safe
            else f"Along {where} there is no safe horizon{then}."
        )
    return sentences


def _widest(audit: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The widest set of turns that was judged: the actions of all policies, or the log."""
    return next((audit["sets"][name] for name in ("on_policies", "held_out") if name in audit["sets"]), None)


def _rewards(audit: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    """The tasks whose rewards are surely too often wrong, on the widest set of the policies' own actions there is."""
    own = _widest(audit)
    where = "the policies' own actions" if "on_policies" in audit["sets"] else "logged actions"
    faults = {"precision": "pays where nothing is earned", "recall": "misses rewards that are earned"}
    return [
        f"Do not trust its rewards for task {task}: on {where} it {fault} ({key} {show(reward[key])})."
        for task, reward in (own["reward"]["by_task"] if own else {}).items()
        for key, fault in faults.items()
        if reward[key]["n"] >= settings.least_n and reward[key]["ci95"][1] < settings.min_reward
    ]


def _confidence(audit: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    own = _widest(audit)
    whole = own["calibration"]["whole"] if own else None
    if own is None or whole is None or whole["ece"]["value"] is None or whole["ece"]["n"] < settings.least_n:
        return []
    if whole["ece"]["value"] <= settings.max_ece:
        return [f"Its confidence can be used as a guard: calibration error {show(whole['ece'])} ({own['about']})."]
    way = "too sure of itself" if whole["confidence"] > whole["right"] else "not sure enough of itself"
    return [
        f"It is {way}: it says {number(whole['confidence'])} on average and is right in {number(whole['right'])} "
        f"(calibration error {show(whole['ece'])}; {own['about']})."
    ]


def _refusals(audit: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    own = _widest(audit)
    if not own:
        return []
    refused = own["refusals"]["refused_too"]
    if refused["n"] < settings.least_n:
        return []
    word = "It refuses what the world refuses" if refused["value"] >= settings.min_sensitivity else "It is too willing"
    invented = own["refusals"]["accepted_too"]
    return [
        f"{word}: of the actions that were refused it refuses {show(refused)}; of the others it accepts "
        f"{show(invented)} ({own['about']})."
    ]


def _sensitivity(audit: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    sens, spec = audit["sensitivity"]["sensitivity"], audit["sensitivity"]["specificity"]
    if sens["n"] < settings.least_n:
        return []
    both = f"sensitivity {show(sens)}; specificity {show(spec)}"
    if sens["value"] < settings.min_sensitivity:
        return [f"It does not listen well to the action: {both}."]
    if spec["value"] is not None and spec["value"] < settings.min_sensitivity:
        return [f"It lets the action matter where it does not: {both}."]
    return [f"It follows the action: {both}."]


_CONTRADICTIONS = {
    "accepted": "does what the log always refuses",
    "refused": "refuses what the log never refuses",
    "changed": "shows another text where one should come back",
    "words": "answers in other words than the log always does",
    "outcome": "pays or ends where the log does not, or the other way round",
    "invariant": "says what such answers never say, or leaves out what they always do",
    "retried": "accepts what it has just refused",
}


def _contradictions(audit: Mapping[str, Any]) -> list[str]:
    if "contradictions" not in audit:
        return []
    own = audit["contradictions"]
    kind, share = max(own["by_kind"].items(), key=lambda item: item[1])
    most = f"; most often it {_CONTRADICTIONS[kind]} ({number(share, 3)} of turns)" if share else ""
    return [
        f"Its dreams contradict themselves in {show(own['rate'], digits=3)} of turns{most}; real episodes, by the same "
        f"rules, in {show(own['real'], digits=3)}."
    ]


_USERS = {
    "words": "words a message",
    "agrees": "of messages that agree",
    "told": "names and numbers told a message",
    "invented": "of messages with names or numbers they cannot know",
    "ends": "of messages that end the dialogue",
}


def _users(audit: Mapping[str, Any]) -> list[str]:
    users = audit["sets"].get("held_out", {}).get("users")
    if not users:
        return []
    differ = [
        f"{number(users[key]['dreamed']['value'])} {title} (logged {number(users[key]['logged']['value'])})"
        for key, title in _USERS.items()
        if (ends := users[key]["difference"]["ci95"]) and not ends[0] <= 0 <= ends[1]
    ]
    return [
        f"Its users differ from logged ones in {'; '.join(differ) or 'nothing that is sure'} "
        f"(n={users['turns']:,} messages)."
    ]


def _optimism(audit: Mapping[str, Any]) -> list[str]:
    if not audit["policies"]:
        return []
    last = audit["policies"][-1]
    if last["gap"]["value"] is None:
        return []
    return [
        f"Of {last['name']} it believes {show(last['dream'])}; really {show(last['real'])}; its dreamed actions solve "
        f"{show(last['replay'])} in reality; optimism gap {show(last['gap'], sign=True)}."
    ]


def _worst(audit: Mapping[str, Any]) -> list[str]:
    own = _widest(audit)
    if not own or not own["failures"]["groups"]:
        return []
    worst = own["failures"]["groups"][0]
    title = worst["title"][:1].lower() + worst["title"][1:]
    return [f"Most of its mistakes ({worst['n']} of {own['failures']['wrong']}; {own['about']}): {title}."]
