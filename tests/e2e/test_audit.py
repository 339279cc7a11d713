"""The audit of a whole run. If the oracle's is not perfect, it blames models for what they do not do; if a bad model's
were perfect too, it would say nothing."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from imagination.cli import main
from imagination.commands import audit
from imagination.commands.audit import audited_before, run_audit
from imagination.commands.experiments.audit_table import audit_others
from imagination.commands.train import train
from imagination.evaluation.audit import AuditInput, LoadedPolicy, PlaySetup, measure
from imagination.evaluation.verdict import targets, verdict
from imagination.rollout.dream_env import Start
from imagination.rollout.play import Replay, ReplayActor
from imagination.runs.run_folder import RunFolder
from imagination.settings import AuditSettings, Config
from imagination.settings.compose import load_config
from policy.agent import LanguageModelAgent
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from real_envs.env import Task
from real_envs.trajectory import Observation, Source, StopReason, Trajectory, Turn
from real_envs.worker_pool import PooledTasks
from real_envs.worlds.textworld import TextWorldGame
from tests.support.asking import TOKENIZER
from tests.support.engines import CONTEXT, MODEL
from tests.support.oracle import OracleWorldModel
from worldmodel.rewards import Goal
from worldmodel.world_model import Prediction

TURNS = 5


@dataclass(frozen=True)
class Skilled:
    """Follows the plan of the game it starts in, and looks around instead with probability ``error``."""

    plans: dict[str, list[str]]
    error: float
    name: str = "skilled"

    def start(self, observation: Observation, seed: int) -> ReplayActor:
        chance, plan = random.Random(f"{self.error}/{seed}"), list(self.plans[observation.text])
        actions = ["look" if chance.random() < self.error or not plan else plan.pop(0) for _ in range(TURNS)]
        return Replay(tuple(actions)).start(observation, seed)


@dataclass
class World:
    tasks: list[Task]
    plans: dict[str, list[str]] = field(default_factory=dict)
    starts: dict[str, Start] = field(default_factory=dict)
    log: list[Trajectory] = field(default_factory=list)


@pytest.fixture(scope="module")
def world(games: list[Task]) -> World:
    """A log of random but admissible commands, a third of them from the plan."""
    found, chance = World(games), random.Random(0)
    game = TextWorldGame(privileged=True)
    for task in games:
        for number in range(40):
            observation = game.reset(task)
            start, turns, stop = observation.text, [], StopReason.TURN_LIMIT
            plan: Sequence[str] = observation.privileged["policy_commands"]  # type: ignore[assignment]
            found.plans[start] = list(plan)
            found.starts[task.id] = Start(task.id, start)
            for _ in range(TURNS):
                plan = observation.privileged["policy_commands"]  # type: ignore[assignment]
                valid: Sequence[str] = observation.privileged["admissible_commands"]  # type: ignore[assignment]
                words = [*plan[:1] * 3, "go nowhere", "take moon", "take star", chance.choice(valid)]
                result = game.step(action := chance.choice(words))
                observation = result.observation
                turns.append(Turn(action, observation.text, result.reward, result.terminated))
                if result.terminated:
                    stop = StopReason.TERMINATED
                    break
            name = f"{task.id}/{number}"
            found.log.append(
                Trajectory(name, task.id, task.id, Source.REAL, "random", number, start, tuple(turns), stop)
            )
    game.close()
    return found


class Optimist:
    """The oracle's answers, but every third turn pays: what a sycophantic world model does."""

    version = "optimist"

    def __init__(self, oracle: OracleWorldModel) -> None:
        self.oracle = oracle

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        true = await self.oracle.predict(start, history, action, seed, session)
        if len(history) % 3 == 2:
            return Prediction(true.observation, 1.0, True, 0.9, 0.9)
        return true

    def release(self, session: object) -> None:
        self.oracle.release(session)


KEYS = ("text", "text_new", "reward_precision", "reward_recall", "gap", "spearman", "cr_pairwise", "ece")


def audit_of(world: World, errors: Sequence[float], optimistic: bool) -> dict[str, object]:
    tasks = PooledTasks({"all": world.tasks}, TextWorldGame, workers=2)
    oracle = OracleWorldModel(tasks.make_env, {world.starts[t.id].text: t for t in world.tasks})
    model = Optimist(oracle) if optimistic else oracle
    chat = ChatFormat(TOKENIZER)
    frozen = LanguageModelAgent(InProcessEngine(MODEL, CONTEXT), chat, 2, 1.0)

    def skilled(error: float) -> LoadedPolicy:
        return LoadedPolicy(Skilled(world.plans, error), None, "v")  # type: ignore[arg-type]

    last = Skilled(world.plans, 0.0)
    last_with_tokens = type("Both", (), {"name": "b", "start": last.start, "chat": chat, "engine": frozen.engine})()
    audit_input = AuditInput(
        model=model,
        log=world.log[::2],
        held=world.log[1::2][:24],
        policies={
            **{f"errs {error}": partial(skilled, error) for error in errors},
            "never errs": lambda: LoadedPolicy(last_with_tokens, MODEL, "v"),
        },
        env_setup=PlaySetup(model, None, world.starts, world.tasks, tasks.make_env, 6, TURNS, seed=0),
        seed=0,
        horizon=TURNS,
    )

    async def run() -> dict[str, object]:
        try:
            return await measure(audit_input, AuditSettings(pairs=15, judged=30))
        finally:
            await oracle.close()
            await tasks.close()

    return asyncio.run(run())


def test_the_oracle_is_perfect(world: World) -> None:
    found: dict = audit_of(world, (1.0, 0.65, 0.5, 0.35), optimistic=False)
    for name, section in found["sets"].items():
        assert section["n"] > 20, name
        assert section["exact"]["value"] == section["token_f1"]["value"] == 1.0
        assert section["malformed"]["value"] == 0.0
        assert section["reward"]["precision"]["value"] == section["reward"]["recall"]["value"] == 1.0
        assert section["end"]["precision"]["value"] == section["end"]["recall"]["value"] == 1.0
        assert section["calibration"]["whole"]["ece"]["value"] == 0.0
        assert {e["value"] for e in section["drift"]["exact_at"].values()} == {1.0}
        assert section["drift"]["first_divergence"] == {}
        assert (section["behr"]["behr"]["value"], section["failures"]["wrong"]) == (0.0, 0)
        assert section["refusals"]["accepted_too"]["value"] == 1.0
    refused = found["sets"]["held_out"]["refusals"]["refused_too"]
    assert refused["value"] == 1.0
    assert refused["n"] > 10  # the log's nonsense is known for what it is
    assert found["sensitivity"]["sensitivity"]["value"] == found["sensitivity"]["specificity"]["value"] == 1.0
    assert found["sensitivity"]["sensitivity"]["n"] >= 5
    real = [policy["real"]["value"] for policy in found["policies"]]
    assert real[0] == 0.0 < real[-1] == 1.0
    assert len(set(real)) >= 4  # policies of different quality, or agreement would say nothing
    for policy in found["policies"]:
        assert policy["gap"] == {"value": 0.0, "n": 12, "ci95": [0.0, 0.0]}
        assert policy["dream"] == policy["replay"] == policy["real"]
        assert policy["failures"] == 0
        if policy["real"]["value"]:
            assert policy["cr"]["value"] == policy["cr_pairwise"]["value"] == 1.0
    agreement = found["agreement"]["plain"]
    assert agreement["mean_absolute_gap"]["value"] == 0.0
    assert agreement["spearman"]["value"] == agreement["kendall"]["value"] == pytest.approx(1.0)
    found["world_model"] = {"kind": "text"}
    settings = AuditSettings(min_policies=5, least_n=5)
    assert {row["key"]: row["met"] for row in targets(found, settings)} == dict.fromkeys(KEYS, True)
    assert verdict(found, settings)["trust"] == "yes"
    assert verdict(found, AuditSettings())["trust"] == "partly"  # five policies have no ranks


def test_a_sycophant_is_found_out(world: World) -> None:
    """Every third turn of its dreams is solved: everybody succeeds there, and nothing in it comes true."""
    found: dict = audit_of(world, (1.0, 0.5), optimistic=True)
    policies = {policy["name"]: policy for policy in found["policies"]}
    assert policies["errs 1.0"]["dream"]["value"] == 1.0
    assert policies["errs 1.0"]["gap"]["value"] == 1.0
    assert policies["errs 1.0"]["cr"]["value"] is None
    assert found["agreement"]["plain"]["spearman"]["value"] is None  # it ranks nobody
    assert found["sets"]["on_policies"]["reward"]["precision"]["value"] < 0.6
    assert found["sets"]["held_out"]["text"]["value"] == 1.0  # which exact observations do not show
    groups = {group["group"] for group in found["sets"]["held_out"]["failures"]["groups"]}
    assert groups <= {"reward", "end"}
    assert "reward" in groups
    found["world_model"] = {"kind": "text"}
    assert verdict(found, AuditSettings(min_policies=3))["trust"] == "no"


def small(tmp_path: Path) -> list[str]:
    return [
        f"output={tmp_path}", "run=small", "preset=tiny", "collect.episodes=40", "collect.validation=0.1",
        "collect.workers=1", "fit.steps=80", "clone.steps=20", "clone.keep_every=10", "audit.episodes=2",
        "audit.min_policies=3", "audit.pairs=10", "audit.judged=6",
    ]  # fmt: skip


def test_a_tiny_run_is_audited_in_real_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], give_games: Callable[[Path], None]
) -> None:
    give_games(tmp_path / "small")
    for stage in ("collect", "fit-world-model", "clone", "audit"):
        assert main([stage, *small(tmp_path)]) == 0
    folder = tmp_path / "small"
    found = json.loads((folder / "audit.json").read_text())
    assert (folder / "models" / "kept" / "clone-00010" / "config.json").exists()
    assert [p["name"] for p in found["policies"]] == ["policy-clone@0.5", "clone-00010", "policy-clone"]
    assert set(found["sets"]) == {"held_out", "on_policy", "on_policies"}
    sampled, greedy = found["sets"]["held_out"]["sampled"], found["sets"]["held_out"]
    assert sampled["exact"]["n"] == greedy["exact"]["n"]
    assert sampled.keys() == {"exact", "text", "token_f1", "malformed", "reward"}
    assert found["real_steps"] > 0
    assert json.loads((folder / "summary.json").read_text())["real_steps"]["audit"] == found["real_steps"]
    undecided = {target["key"] for target in found["targets"] if target["met"] is None}
    few = {t["key"] for t in found["targets"] if t["estimate"]["value"] is None or t["estimate"]["n"] < 20}
    assert undecided <= few | {"gap", "spearman", "cr_pairwise"}
    assert found["verdict"]["trust"] in ("partly", "no")  # it has hardly learned anything
    assert "behr" in found["sets"]["on_policy"]
    assert "several temperatures" in " ".join(found["notes"])
    printed = capsys.readouterr().out
    assert "Audit of worldmodel" in printed
    assert str(folder / "audit.html") in printed
    page = (folder / "audit.html").read_text()
    assert found["verdict"]["sentences"][0] in page

    # the table takes the audit that is there
    assert main(["audit-table", f"output={tmp_path}", "run=table", *small(tmp_path)[2:], f"audit.runs=[{folder}]"]) == 0
    assert "audited before" in capsys.readouterr().out
    assert (tmp_path / "table" / "audit-table.md").read_text().startswith("| run | world model |")
    # another kind of world model on the same log, judged by what the same policies do
    config = load_config(small(tmp_path), Config)
    (row,) = audit_others(config, folder, folder)
    there = folder / "worlds" / "delta"
    assert (row["run"], row["world_model"]["name"], row["world_model"]["kind"]) == ("small", "delta", "delta")
    assert row["targets"][0]["target"] == config.audit.min_delta
    other = json.loads((there / "audit.json").read_text())
    assert [p["name"] for p in other["policies"]] == ["policy-clone@0.5", "clone-00010", "policy-clone"]
    assert other["real_steps"] > 0
    assert json.loads((there / "summary.json").read_text())["real_steps"]["fit_world_model"] == 0
    fitted = (there / "models" / "worldmodel" / "config.json").stat().st_mtime_ns
    assert audit_others(config, folder, folder) == [row]  # neither is done again
    assert (there / "models" / "worldmodel" / "config.json").stat().st_mtime_ns == fitted
    assert "audited before" in capsys.readouterr().out


def test_without_a_real_environment_only_the_log_is_judged(cloned: Path, tmp_path: Path, tiny: Config) -> None:
    """A log of one's own world: no real step, and the verdict says what was not measured."""
    run, tiny.collect.validation, tiny.train.keep_every = Path(shutil.copytree(cloned, tmp_path / "run")), 0.3, 2
    train(tiny, run)
    assert [path.name for path in (run / "models" / "kept").iterdir()] == ["train-00002"]  # not also the last one
    found = run_audit(tiny, run)
    assert set(found["sets"]) == {"held_out"}
    assert (found["policies"], found["agreement"], found["real_steps"]) == ([], {}, 0)
    assert found["sets"]["held_out"]["n"] > 10
    assert "behr" in found["sets"]["held_out"]
    assert any("cannot be played" in note for note in found["notes"])
    assert audited_before(tiny, run) is not None
    assert run_audit(tiny, run)["sets"] == found["sets"], "asked again, it says the same"
    tiny.audit.least_n = 5
    assert audited_before(tiny, run) is None  # other settings, other verdict


def test_a_declared_goal_says_what_the_log_should_have_paid(
    cloned: Path, tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions have its rewards; by the log's own, all that pay would be wrong."""
    given: list[AuditInput] = []

    async def noted(audit_input: AuditInput, *_: object) -> dict[str, list[str]]:
        given.append(audit_input)
        return {"notes": []}

    monkeypatch.setattr(audit, "measure", noted)
    tiny.worldmodel.goal = Goal(observation="You take", reward=0.5)
    asyncio.run(audit._audit(tiny, RunFolder(Path(shutil.copytree(cloned, tmp_path / "run")), 0)))
    for episodes in (given[0].log, given[0].held):
        assert {turn.reward for t in episodes for turn in t.turns} == {0.0, 0.5}


def test_settings_that_cannot_work(cloned: Path, tmp_path: Path, tiny: Config) -> None:
    tiny.audit.policies = ["nowhere"]
    with pytest.raises(ValueError, match=r"audit.policies: nowhere"):
        run_audit(tiny, Path(shutil.copytree(cloned, tmp_path / "run")))
