"""What an import says on the terminal: what it did, what the log covers now, and which command comes next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from imagination.settings import Config
from real_envs.importers.coverage import Coverage, quantile
from real_envs.importers.formats import Refusal
from worldmodel.evaluation.proportions import interval, number

REFUSED = "refused.jsonl"
_SHOWN = 5  # refusals on the terminal
_LONG, _LONGEST = 1000, 8192  # characters of an observation; tokens of a context that a machine can be asked for


@dataclass(slots=True)
class Report:
    """What an import did.

    Attributes:
        added, again: episodes that the log did not have yet, and those that it had.
        paid: episodes whose success became their last reward.
        refused: records that are no episode; ``shown`` are the first of them.
        unknown: files of folders that are in no known format.
        left_out: records by the name of a field that had no place.
        masks: distinct secrets by kind; ``None`` where nothing was masked.
    """

    added: int = 0
    again: int = 0
    paid: int = 0
    refused: int = 0
    shown: list[Refusal] = field(default_factory=list)
    unknown: list[Refusal] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    masks: dict[str, int] | None = None

    def refuse(self, refusal: Refusal) -> None:
        self.refused += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(refusal)


def told(report: Report, coverage: Coverage, found: Mapping[str, Any], outcomes: Iterable[str] = ()) -> Iterator[str]:
    """What an import did and what the log covers now, line by line.

    Args:
        found: what ``coverage.json`` says.
    """
    yield ""
    yield f"{report.added} episodes added" + (f", {report.again} were in the log already" if report.again else "")
    if report.refused:
        yield f"{report.refused} records refused, all of them in {REFUSED}:"
        yield from (f"  {refusal}" for refusal in report.shown)
    if report.unknown:
        yield f"{len(report.unknown)} files of folders left alone, all of them in {REFUSED}:"
        yield from (f"  {refusal}" for refusal in report.unknown[:_SHOWN])
    if report.left_out:
        names = ", ".join(f"{name} ({count})" for name, count in report.left_out.most_common(8))
        yield f"fields without a place in the log, left out: {names}"
    if report.masks is None:
        yield "secrets are not masked: imports.mask=false"
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.masks.items())) or "none found"
        yield f"secrets masked: {kinds}; imports.mask=false keeps them"
    if report.paid:
        worth = f"{coverage.solved_at:g}"
        yield f"{report.paid} episodes state success and no reward: it is the last turn's reward now, {worth} or 0"
    yield from outcomes
    rewards, lengths, success = found["rewards"], found["turns_per_episode"], found["success"]
    splits = ", ".join(f"{count} {split}" for split, count in found["tasks"].items())
    yield ""
    yield f"the log: {coverage.episodes} episodes of {len(coverage.tasks)} tasks ({splits}), {coverage.turns} turns"
    yield f"  turns per episode  {lengths['least']} to {lengths['most']}, median {lengths['median']}"
    yield f"  distinct           {found['distinct_actions']} actions, {found['distinct_observations']} observations"
    paid = f"{rewards['turns']} turns state one, {rewards['turns_not_zero']} of them not 0"
    yield f"  rewards            {paid}, {rewards['of_these_at_the_end']} of these at the end"
    yield f"  success            known in {success['known']} episodes, {success['solved']} solved"
    yield f"  ends               {coverage.terminated} episodes ended by the world, {coverage.failed} broke"
    yield f"  refused actions    {coverage.invalid} turns"
    same = found["determinism"]
    if same["same_answer"] is not None:
        yield f"  determinism        {same['same_answer']:.1%} of turns whose state and action occur more than once"
    yield f"  duplicates         {found['duplicate_turns']} turns"
    yield f"  held out           {found['heldout_turns_in_train']} of its turns are in training tasks, too"
    if (shared := found["looked_up"]) is not None:
        share, between, turns = (shared["exact"][key] for key in ("value", "ci95", "n"))
        right = f"{number(share)} {interval(between)} of {turns} turns"
        sample = f", of a sample of {shared['episodes']} episodes" if shared["sampled"] else ""
        yield f"  looked up          {right} are answered rightly by the most similar turn of another task{sample}"
    if (near := found["near_duplicates"])["tasks"]:
        yield (
            f"  near-duplicates    {near['tasks']} tasks in {near['groups']} groups begin nearly alike and are kept "
            f"together; split one by one, {near['leaks_if_split_by_task']} held-out ones would have a double in train"
        )
    yield ""
    missing = found["missing"]
    yield from ("missing for dreams:", *(f"  {line}" for line in missing)) if missing else ("nothing is missing",)


def following(config: Config, coverage: Coverage) -> Iterator[str]:
    """The commands that come next, with limits that the log would not fit raised to what it needs.

    Tokens are guessed: models from scratch write about two characters by one in the worst of logs.
    """
    episode, action = quantile(coverage.episode_sizes), quantile(coverage.action_sizes)
    longest = max(2 * config.max_action_tokens, 128 * math.ceil(action / 128))
    dreamed = config.dream.max_turns * longest + 2  # else train would refuse: the actions of a dream have to fit
    needs = (
        ("worldmodel.context", episode, config.worldmodel.context),
        ("policy.context", max(episode, dreamed), config.policy.context),
        ("dream.max_tokens", quantile(coverage.observation_sizes), config.dream.max_tokens),
        ("max_action_tokens", action, config.max_action_tokens),
    )
    raised = [
        f"{key}={min(64 * math.ceil(size / 2 / 64), _LONGEST)}"
        for key, size, limit in needs
        if min(size / 2, _LONGEST) > limit
    ]
    agents = ",".join(agent for agent, _ in coverage.agents.most_common(3))
    solved_expert = any(agent == "expert" for agent in coverage.agents)
    yield ""
    yield "next:"
    if quantile(coverage.observation_sizes) > 2 * _LONGEST:
        yield (
            f"  observations of {quantile(coverage.observation_sizes):,} characters are too long for a small model; "
            "fit-world-model will refuse them: import shorter ones, such as without what no action changes"
        )
    elif quantile(coverage.observation_sizes) > _LONG:
        yield "  observations are long: with worldmodel.kind=delta the world model writes only what changes"
    yield " ".join([f"  imagine fit-world-model run={config.run}", *raised])
    yield f"  imagine clone run={config.run} clone.agents=[{agents}]"
    yield f"  imagine train run={config.run}" + ("" if solved_expert else " train.expert_share=0")
    yield f"  imagine audit run={config.run}"
    if raised:
        yield "the run keeps these limits; they are guesses from above, long ones cost time and memory"
