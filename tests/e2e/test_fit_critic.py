"""From a log to the critic that PPO begins with. If this fails, `train` begins with values of 0 all the same."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.commands import fit_critic as stage
from imagination.commands import train as training
from imagination.commands.check_train import longest_episode
from imagination.commands.fit_critic import fit_critic
from imagination.learning.algorithms import build_algorithm
from imagination.learning.critic import load_critic, made_for
from imagination.runs.models import load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from worldmodel.extras.synther.settings import SyntherSettings


@pytest.fixture
def run(cloned: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(cloned, tmp_path / "run")
    return RunFolder(tmp_path / "run", 0)


def test_train_begins_with_the_critic_that_was_fitted_to_the_log(
    run: RunFolder, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.algorithm.name, tiny.algorithm.gamma, tiny.critic.steps = "turn_ppo", 0.9, 50
    begun: list[Any] = []

    class Stop(Exception):
        pass

    def module(*_: object, value: object, **__: object) -> None:
        begun.append(value)
        raise Stop

    monkeypatch.setattr(training, "PolicyModule", module)
    with pytest.raises(Stop):
        training.train(tiny, run.path)
    fit_critic(tiny, run.path)
    with pytest.raises(Stop):
        training.train(tiny, run.path)
    version = weights_version(load_model(run.model("policy-clone"), "clone", tiny.policy)[0])
    algorithm = build_algorithm(tiny.algorithm, longest_episode(tiny))
    fitted = load_critic(run.model("critic"), made_for(version, algorithm, tiny.train, tiny.worldmodel.goal))
    assert torch.equal(begun[1].linear.weight, fitted.linear.weight)
    assert not torch.equal(begun[0].linear.weight, fitted.linear.weight)
    assert run.summary["critic"]["transitions"] > 60
    assert "kept_back_error" in run.summary["critic"]
    assert run.summary["done"]["fit_critic"]
    assert not run.model("synther").exists()
    assert "transitions" in capsys.readouterr().err

    tiny.algorithm.gamma = 0.5
    with pytest.raises(UserError, match=r"gamma was 0\.9 and is 0\.5"):
        training.train(tiny, run.path)
    tiny.algorithm.name, tiny.algorithm.gamma = "rloo", None
    with pytest.raises(Stop):
        training.train(tiny, run.path)
    assert begun[2] is None, "an algorithm without a critic does not look"


def test_it_is_judged_by_the_agents_that_it_was_fitted_to(
    run: RunFolder, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.algorithm.name, tiny.critic.steps, tiny.critic.agents = "turn_ppo", 5, ["noisy"]
    asked: list[set[str]] = []
    transitions_of = stage.transitions_of

    def recorded(*args: Any) -> Any:
        asked.append({episode.agent for episode in args[-1]})
        return transitions_of(*args)

    monkeypatch.setattr(stage, "transitions_of", recorded)
    fit_critic(tiny, run.path)
    assert len(asked) == 2
    assert all(agent.startswith("noisy") for agents in asked for agent in agents)


def test_synthetic_transitions_go_into_the_fit_and_are_checked(run: RunFolder, tiny: Config) -> None:
    pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")
    tiny.algorithm.name, tiny.critic.steps = "turn_ppo", 5
    fit_critic(tiny, run.path)
    before = (run.model("critic") / "model.safetensors").read_bytes()
    tiny.critic.synther = SyntherSettings(
        ratio=0.5, samples=50, dims=4, hidden=16, layers=1, steps=5, batch=16, denoising_steps=4
    )
    fit_critic(tiny, run.path)
    assert (run.model("critic") / "model.safetensors").read_bytes() != before
    told = run.summary["critic"]["synther"]
    assert told["samples"] == 50
    assert 0 < told["kept_variance"] <= 1
    assert told["logged"].keys() == told["synthetic"].keys() == {"marginal", "correlation", "dynamics_error"}
    assert (run.model("synther") / "denoiser" / "config.json").exists()


def test_what_is_missing_is_said_in_a_line(run: RunFolder, tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"algorithm=grpo .* ppo"):
        fit_critic(tiny, run.path)
    tiny.algorithm.name, tiny.critic.agents = "ppo", ["nobody"]
    with pytest.raises(UserError, match=r"critic\.agents=\['nobody'\]"):
        fit_critic(tiny, run.path)
    tiny.critic.agents, tiny.policy.context = [], 8
    with pytest.raises(UserError, match=r"fits policy\.context=8"):
        fit_critic(tiny, run.path)
    tiny.critic.synther = SyntherSettings(ratio=0.5)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"critic\.synther\.ratio .* diffusers: pip install"):
        stage.fit_critic(tiny, run.path)
