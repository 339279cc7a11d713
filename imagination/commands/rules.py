from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from imagination.runs.lifecycle import run_stage
from imagination.runs.log import read_log
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, RulesSettings, UserError
from real_envs.chat_server import ChatServer
from real_envs.trajectory import Trajectory
from worldmodel.rewards import Goal
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.propose import ask_for_rules
from worldmodel.rules.rule_set import FILE, RuleSet, check_rules


def rules(config: Config, folder: Path) -> None:
    """Mine rules from the log: observations that follow from the action, each with its evidence.

    A rule says when an action is refused, or what its observation repeats. It is kept where it is right on at
    least 99 % of the turns of other tasks (lower end of the 95 % interval). Dreams answer by rule where one
    applies, and by the model elsewhere (worldmodel.rules). `fit-world-model` mines rules as well; this command
    adds them to older runs. With rules.url and rules.model a language model proposes further rules, which
    must pass the same test.

    Reads: log/
    Writes: models/rules.json

    Examples:
        imagine rules run=mine
        imagine rules run=mine rules.url=http://localhost:8000/v1 rules.model=qwen
    """
    with run_stage(config, folder, "rules") as run:
        train, held = read_log(run, config.collect.validation)
        file = run.path / "models" / FILE
        before = file.read_bytes() if file.exists() else b""
        mined, measured = find_rules(run, config.worldmodel.goal, train, held, config.rules, config.seed)
        if config.worldmodel.rules != "off" and file.read_bytes() != before:  # dreams had others; no setting says so
            done = run.summary.get("done", {}).keys() & {"reflect", "train", "evaluate"}
            run.update({"done": dict.fromkeys(done, "of other rules")})
    for number, rule in enumerate(mined.rules, start=1):
        print(f"{number:3}. {rule}")
    for number, invariant in enumerate(mined.invariants, start=len(mined.rules) + 1):
        print(f"{number:3}. {invariant}")
    print(rules_sentence(measured))
    print(f"written to {run.path / 'models' / FILE}; worldmodel.rules=off dreams without them")


def find_rules(
    run: RunFolder,
    goal: Goal,
    train: Sequence[Trajectory],
    held: Sequence[Trajectory],
    ask: RulesSettings | None = None,
    seed: int = 0,
) -> tuple[RuleSet, dict[str, Any]]:
    """The rules of a log, saved, and how they do on episodes that they were not mined from.

    Where ``ask`` has a ``url``, a language model proposes further ones.

    Raises:
        UserError: the model or its key is missing, or no question was answered.
    """
    server = ask.open("rules") if ask is not None and ask.url else None
    relabelled = goal.relabel_log(train)
    with Bar("mine rules", 1) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.advance(done)

        mined = mine_rules(relabelled, advance)
    if ask is not None and server is not None:
        mined = _with_proposed(mined, relabelled, server, ask.questions, seed)
    (run.path / "models").mkdir(parents=True, exist_ok=True)
    mined.save(run.path / "models")
    measured = check_rules(mined, goal.relabel_log(held))
    run.update({"rules": measured})
    return mined, measured


def _with_proposed(rules: RuleSet, log: Sequence[Trajectory], server: ChatServer, questions: int, seed: int) -> RuleSet:
    with closing(server):
        proposed = ask_for_rules(rules, log, server, questions, seed)
    if proposed.failed and proposed.failed == proposed.questions:
        raise UserError(f"rules.url: no question was answered: {proposed.reason}")
    print(
        f"{server.model} proposed {proposed.proposed} rules in {proposed.questions - proposed.failed} answers, "
        f"{proposed.invalid} lines were none; {len(proposed.rules)} hold on the log",
        file=sys.stderr,
    )
    return RuleSet(rules.language, [*rules.rules, *proposed.rules], rules.invariants)


def rules_sentence(measured: dict[str, Any]) -> str:
    """``16 rules (8 refuse) answer 2,624 of 4,703 held-out turns (56 %), 0 of them wrong; 90 invariants reject ...``"""
    share = measured["answered"] / measured["turns"] if measured["turns"] else 0.0
    worded = measured["worded"]
    return (
        f"{measured['rules']} rules ({measured['refusing']} refuse) answer {measured['answered']:,} of "
        f"{measured['turns']:,} held-out turns ({share:.0%}), {measured['wrong']:,} of them wrong"
        + (f"; of {worded:,} more they know the words, {measured['misworded']:,} wrong" if worded else "")
        + f"; {measured['invariants']} invariants reject {measured['rejected']:,} true answers"
    )
