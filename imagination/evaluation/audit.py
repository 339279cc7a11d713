"""Is this world model good enough to dream in? All measurements of an audit, put together.

Schema of ``audit.json``, version 3. An *estimate* is ``{"value": number | null, "n": int, "ci95": [low, high] |
null}``; null is "not measured", never 0::

    format, version       "imagination-audit", 3
    run, world_model      the run's name; {"name", "version", "kind"} of the audited model
    settings              hash of the settings that decide what the audit says
    seeds                 {"run": seed of policies and dreams, "bootstrap": seed of all resampling}
    horizon               turns of an episode
    seconds, real_steps   what the audit cost
    notes                 sentences: what could not be measured, and why
    verdict               {"trust": "yes" | "partly" | "no" | "unknown", "sentences": [...]}
    forecast              what came of dreams like these, see ``imagination.evaluation.forecast``; null where nothing
                          can be said, and missing in audits of earlier versions
    targets               [{"key", "title", "bound": ">=" | "<=", "target", "estimate": estimate, "met": bool | null}]
    sets                  by name: "held_out" (episodes of the log that the model was not fitted to), "on_policy" (the
                          last policy's own actions in the real environment), "on_policies" (those of all policies);
                          on_* are missing without a real environment. Each::
        about             what the set is, in words
        n, episodes, tasks, failed                  counts; failed: turns at which generation broke, in no other number
        new               {"exact", "text"}: estimates, of turns that no episode the model was fitted to has (the same
                          task, actions so far and action); only for "held_out"
        exact, text, token_f1, malformed            estimates; exact is text, reward and end
        sampled           the same four and "reward", of the model as dreams sample it; missing where that is greedily
        by_step, by_changes, by_task                exact, as {name: estimate}
        reward            {"precision", "recall", "accuracy"}: estimates, and "by_task": {task: the same three}
        end               {"precision", "recall", "accuracy"}: estimates
        calibration       "whole", "outcome", "deciding": {"ece": estimate, "confidence", "right": means,
                          "bins": [{"low", "high", "n", "confidence", "right"}]}
        refusals          {"patterns": how many were learned, "refused_too", "refused_in_its_words", "accepted_too"}
        drift             {"n", "exact_at": {k: estimate}, "true_until": {k: estimate},
                          "first_divergence": {turns: count}, "never": count}
        behr              {"behr", "absolute": estimates in nats, "differing": count}; missing without a policy
        failures          {"n", "wrong", "wrong_reward", "groups": [{"group", "title", "n", "share_of_wrong",
                          "examples": [...]}]}
    sensitivity           {"states", "sensitivity", "specificity"}
    policies              [{"name", "n", "failures", "dream", "guarded", "replay", "real", "gap", "guarded_gap", "cr",
                          "cr_pairwise"}], oldest first; estimates where not a name or a count
    contradictions        {"rate": estimate, "by_kind": {kind: share of turns}, "turns", "real": estimate of real turns
                          held out}: dreamed turns that contradict their own dream; missing without rules or dreams
    agreement             {"plain", "guarded"}: {"policies", "episodes_each", "planned", "spearman", "kendall",
                          "mean_absolute_gap", "cr_pairwise" (plain only)}; {} without a real environment

What the measures are is said, with sources, in ``worldmodel/evaluation/``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagination.rollout.dream_env import NO_GUARD, DreamEnv, Guard, Start
from imagination.rollout.play import Episode, Provenance, plan, play_all, replay_all
from imagination.settings import AuditSettings
from policy.agent import LanguageModelAgent
from real_envs.env import Env, Task
from real_envs.trajectory import Source, Trajectory
from worldmodel.evaluation.agreement import Triple, agreement_metrics, success_metrics
from worldmodel.evaluation.behaviour import behaviour_metrics
from worldmodel.evaluation.dreams import contradiction_metrics, drift_metrics, roll
from worldmodel.evaluation.failures import failure_groups, known_answers, refusal_metrics
from worldmodel.evaluation.sensitivity import action_pairs, judge_pairs, sensitivity_metrics
from worldmodel.evaluation.transitions import in_new_situations, judge, outcome_metrics, share, transition_metrics
from worldmodel.evaluation.users import user_metrics
from worldmodel.rules.refusals import Refusals, learn_refusals
from worldmodel.rules.rule_set import RuleSet
from worldmodel.world_model import WorldModel

FORMAT, VERSION = "imagination-audit", 3
ABOUT = {
    "held_out": "episodes of the log that the model was not fitted to",
    "on_policy": "the actions of {policy} in the real environment",
    "on_policies": "the actions of all policies in the real environment",
}


@dataclass(frozen=True, slots=True)
class AuditInput:
    """What is audited, and with what."""

    model: WorldModel  # predicts greedily
    log: Sequence[Trajectory]  # real episodes that it was fitted to; what refuses and answers is learned from them
    held: Sequence[Trajectory]  # real episodes that it was not fitted to
    # loads each policy that is ranked, by name, oldest first; the last is the one whose own actions are judged apart
    policies: dict[str, Callable[[], LoadedPolicy]]
    env_setup: PlaySetup | None  # where they play; ``None`` without a real environment
    seed: int  # of the run
    horizon: int  # turns of an episode
    # the same model for judging it by given episodes, of which it must be shown nothing (one that looks up a log would
    # find the answer there); ``None`` for a model that looks up nothing
    apart: Callable[[Sequence[Trajectory]], WorldModel] | None = None
    sampled: Callable[[Sequence[Trajectory]], WorldModel] | None = None  # at the temperature of dreams; or greedy, too
    rules: RuleSet | None = None  # of the log, by which contradictions within dreams are told

    def judged_by(self, episodes: Sequence[Trajectory]) -> WorldModel:
        return self.model if self.apart is None else self.apart(episodes)


async def measure(
    audit_input: AuditInput, settings: AuditSettings, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Everything of ``audit.json`` that is measured, from ``notes`` on; ``progress`` is told what begins."""
    refusals = learn_refusals([*audit_input.log, *audit_input.held])
    known = known_answers([*audit_input.log, *audit_input.held])
    notes: list[str] = []
    if not refusals.patterns:
        notes.append("No answer of the log could be told to be a refusal: too few episodes share their beginnings.")

    played: dict[str, PolicyEpisodes] = {}
    frozen: LoadedPolicy | None = None
    for number, (policy, load) in enumerate(audit_input.policies.items(), start=1):
        last = number == len(audit_input.policies)
        if audit_input.env_setup is None and not last:
            continue
        loaded = load()
        if audit_input.env_setup is not None:
            progress(f"policy {number} of {len(audit_input.policies)}: {policy}")
            played[policy] = await play_three_ways(audit_input.env_setup, policy, loaded)
        frozen = loaded if last else None
        del loaded
        gc.collect()  # engines and their caches hang in cycles, and ten of them do not fit a laptop

    sets: dict[str, Any] = {}
    for name, episodes in _sets(audit_input, played, settings.judged).items():
        progress(f"world model on {name.replace('_', ' ')}: {len(episodes)} episodes")
        sets[name] = await _section(audit_input, episodes, refusals, known, frozen, fresh=name == "held_out")
        if sets[name]["failed"]:
            notes.append(f"Generation broke at {sets[name]['failed']} turns of {name}; they are left out.")
        sets[name]["about"] = ABOUT[name].format(policy=next(reversed(audit_input.policies), ""))

    progress("pairs of actions")
    pairs = action_pairs(audit_input.log, audit_input.held, audit_input.seed, settings.pairs)
    sensitivity = sensitivity_metrics(await judge_pairs(audit_input.judged_by(audit_input.held), pairs))
    if not pairs:
        notes.append("No state of the log has two continuations, so action sensitivity could not be measured.")
    triples = [triple for each in played.values() for triple in each.triples]
    agreement: dict[str, Any] = {}
    if triples:
        agreement["plain"] = agreement_metrics(triples, audit_input.seed)
        if audit_input.env_setup is not None and audit_input.env_setup.guard is not None:
            agreement["guarded"] = agreement_metrics(triples, audit_input.seed, guarded=True)
    dreams = [t for each in played.values() for t in each.dreams if not t.stop.is_failure]
    contradictions: dict[str, Any] = {}
    if audit_input.rules is not None and dreams:
        contradictions["contradictions"] = {
            **contradiction_metrics(dreams, audit_input.rules),
            "real": contradiction_metrics(audit_input.held, audit_input.rules)["rate"],
        }
    return {
        **contradictions,
        "sets": sets,
        "sensitivity": sensitivity,
        "policies": [
            {"name": name, **success_metrics(each.triples, audit_input.seed)} for name, each in played.items()
        ],
        "agreement": agreement,
        "notes": notes,
    }


def _sets(audit_input: AuditInput, played: dict[str, PolicyEpisodes], limit: int) -> dict[str, list[Trajectory]]:
    """The episodes of each set; of those of all policies an even choice."""
    sets = {"held_out": list(audit_input.held)}
    if played:
        everything = [t for each in played.values() for t in each.real if t.turns and not t.stop.is_failure]
        step = max(1, -(-len(everything) // max(1, limit)))
        last = next(reversed(played.values())).real
        sets["on_policy"] = [t for t in last if t.turns and not t.stop.is_failure]
        sets["on_policies"] = everything[::step]
    return sets


async def _section(
    audit_input: AuditInput,
    episodes: Sequence[Trajectory],
    refusals: Refusals,
    known: set[tuple[str, str]],
    frozen: LoadedPolicy | None,
    fresh: bool,
) -> dict[str, Any]:
    model = audit_input.judged_by(episodes)
    failed: list[tuple[str, int]] = []
    judged = await judge(model, episodes, failed=failed)
    rolled = await roll(model, episodes, audit_input.horizon)
    section = {
        **transition_metrics(judged, audit_input.seed),
        "failed": len(failed),
        **outcome_metrics(judged, audit_input.seed),
        "refusals": refusal_metrics(judged, refusals),
        "drift": drift_metrics(rolled),
        "failures": failure_groups(judged, episodes, refusals, known),
        "users": user_metrics(judged, episodes, audit_input.seed),
    }
    if audit_input.sampled is not None:
        drawn = await judge(audit_input.sampled(episodes), episodes)
        words = transition_metrics(drawn, audit_input.seed)
        section["sampled"] = {key: words[key] for key in ("exact", "text", "token_f1", "malformed")}
        section["sampled"]["reward"] = outcome_metrics(drawn, audit_input.seed)["reward"]
    if fresh:
        new = in_new_situations(judged, episodes, audit_input.log)
        hits = {"exact": [j.exact for j in new], "text": [j.text_right for j in new]}
        section["new"] = {key: share(new, hit).to_json() for key, hit in hits.items()}
    if frozen is not None:
        agent = frozen.agent
        section["behr"] = behaviour_metrics(
            judged, episodes, frozen.model, agent.chat, agent.engine.context, audit_input.seed
        )
    return section


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy that can play."""

    agent: LanguageModelAgent
    model: Any
    version: str


@dataclass(frozen=True, slots=True)
class PolicyCandidate:
    """A folder with a policy and the temperature at which it plays."""

    name: str
    folder: Path
    temperature: float


def find_candidates(
    models: Path, temperature: float, wanted: int, temperatures: Sequence[float]
) -> list[PolicyCandidate]:
    """The policies of a run by age: those kept while cloning, the clone, those kept while training, the last one.

    Where these are fewer than ``wanted``, the last policy and the clone also play at other temperatures. Those differ
    less in quality than checkpoints do, so rank agreement says less about them; the audit notes how many there are.
    """
    kept = models / "kept"
    folders = [*sorted(kept.glob("clone-*")), models / "policy-clone", *sorted(kept.glob("train-*")), models / "policy"]
    existing = [folder for folder in folders if (folder / "config.json").exists()]
    candidates = [PolicyCandidate(folder.name, folder, temperature) for folder in existing]
    return fill_up(candidates, [f for f in reversed(existing) if f.parent == models], wanted, temperatures)


def fill_up(
    candidates: Sequence[PolicyCandidate], folders: Sequence[Path], wanted: int, temperatures: Sequence[float]
) -> list[PolicyCandidate]:
    """The candidates, and before them their ``folders`` at other temperatures until there are ``wanted`` in all."""
    own, names = {(c.folder, c.temperature) for c in candidates}, {c.folder: c.name for c in candidates}
    others = [PolicyCandidate(f"{names[f]}@{t:g}", f, t) for t in temperatures for f in folders if (f, t) not in own]
    return [*others[: max(0, wanted - len(candidates))], *candidates]


@dataclass(frozen=True, slots=True)
class PlaySetup:
    """Where policies play."""

    dream: WorldModel  # as it is dreamed in
    guard: Guard | None  # of guarded dreams; ``None`` plays none
    starts: Mapping[str, Start]  # by task id, the real beginning of each task
    tasks: Sequence[Task]  # real ones, all of which have a start
    make_env: Callable[[], Env]  # a real environment
    episodes: int  # per task and kind
    max_turns: int
    seed: int  # of the run
    solved_at: float | None = None  # of dreams, see ``Provenance``


@dataclass(frozen=True, slots=True)
class PolicyEpisodes:
    """What one policy did: a ``Triple`` per task and seed, and the real episodes and dreams behind it."""

    triples: list[Triple]
    real: list[Trajectory]
    dreams: list[Trajectory]


async def play_three_ways(env_setup: PlaySetup, name: str, loaded: LoadedPolicy) -> PolicyEpisodes:
    """Plays one policy.

    The same task and seed give the policy the same chance in each world, so what differs is the world's doing.
    """

    async def play(kind: str, make_env: Callable[[], Env], stamp: Provenance, at_once: int) -> list[Trajectory]:
        episodes, most = _plan(env_setup, f"{kind}/{name}"), env_setup.max_turns
        return await play_all(episodes, make_env, loaded.agent, stamp, most, concurrency=at_once)

    async def dreams(kind: str, guard: Guard) -> list[Trajectory]:
        stamp = Provenance(Source.DREAM, loaded.version, env_setup.dream.version, env_setup.solved_at)
        return await play(kind, lambda: DreamEnv(env_setup.dream, env_setup.starts, guard), stamp, 128)

    dreamed = await dreams("dream", NO_GUARD)
    guarded: Sequence[Trajectory | None] = [None] * len(dreamed)
    if env_setup.guard is not None:
        guarded = await dreams("guarded", env_setup.guard)
    real = await play("real", env_setup.make_env, Provenance(Source.REAL, loaded.version), 64)
    replays = await _replay(env_setup, dreamed, name)
    triples = [
        Triple(name, four[0].task_id, four[0].seed, *map(_solved, four))
        for four in zip(dreamed, replays, real, guarded, strict=True)
    ]
    return PolicyEpisodes(triples, real, dreamed)


async def _replay(env_setup: PlaySetup, dreamed: Sequence[Trajectory], name: str) -> list[Trajectory | None]:
    """The dreamed actions in the real environment; nothing where the dream failed or did nothing."""
    beside = zip(_plan(env_setup, f"replay/{name}"), dreamed, strict=True)
    asked = {e.id: (e, dream) for e, dream in beside if dream.turns and not dream.stop.is_failure}
    dreams = {key: dream for key, (_, dream) in asked.items()}
    replays = await replay_all(dreams, [episode for episode, _ in asked.values()], env_setup.make_env)
    by_dream = {dreams[replay.id].id: replay for replay in replays}
    return [by_dream.get(dream.id) for dream in dreamed]


def _plan(env_setup: PlaySetup, prefix: str) -> list[Episode]:
    tasks = [replace(task, spec={**task.spec, "start": task.id}) for task in env_setup.tasks]
    return plan(tasks, env_setup.episodes, prefix, env_setup.seed)


def _solved(episode: Trajectory | None) -> bool | None:
    return None if episode is None or episode.stop.is_failure else episode.solved
