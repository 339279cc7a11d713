"""Tasks where a policy fails. If these fail, a generator adapts to something else, or draws others at every start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.collect import failure_weights, generate_tasks
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.compose import load_config
from real_envs.env import Task
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from real_envs.worlds.textworld_express import TextWorldExpress


def test_a_task_is_drawn_by_the_failures_of_its_parameters_and_not_of_its_seed() -> None:
    seen = [({"p": f"rooms={rooms},doors={k % 2}", "seed": str(k)}, rooms == 2) for k, rooms in enumerate([2, 9] * 4)]
    # two rooms: 1 of 6; nine: 5 of 6; doors are 0 in two rooms alone, so both values say what the rooms say
    weights = failure_weights(
        [{"p": "rooms=2,doors=0", "seed": "0"}, {"p": "rooms=9,doors=1", "seed": "99"}, {"p": "rooms=5,doors=1"}], seen
    )
    assert weights == pytest.approx([1 / 36, 25 / 36, 5 / 12])
    assert failure_weights([{"seed": "1"}], seen) == [1.0]


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[..., list[Task]]:
    pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")

    def draw(name: str, *overrides: str) -> list[Task]:
        params = "env.options.params='numLocations=2..5,includeDoors=0'"
        words = ["env=textworld_express", params, "games.train=5", "games.heldout=2", f"output={tmp_path}", *overrides]
        run = RunFolder(tmp_path / name, 0)
        generate_tasks(load_config(words, Config), run)
        return list(TextWorldExpress().drawn(run.games)[1]["train"])

    return draw


def trained(folder: Path, tasks: list[Task], solves: Callable[[str], bool]) -> None:
    """Notes two dreams of each task."""
    turn = Turn("take coin", "You take the coin.", 0.0, True)
    episodes = [
        Trajectory(f"{task.id}/{k}", task.id, task.id, Source.DREAM, "policy", 0, "A kitchen.", (turn,),
                   StopReason.TERMINATED, success=solves(task.spec["params"]))
        for task in tasks for k in range(2)
    ]  # fmt: skip
    run = RunFolder(folder, 0)
    run.add_rollouts("train", episodes)
    run.update({})


def test_training_tasks_are_drawn_where_the_policy_of_another_run_fails(
    drawn: Callable[..., list[Task]], tmp_path: Path
) -> None:
    first = drawn("first")
    sizes = {task.spec["params"] for task in first}
    assert len(sizes) > 1
    assert all(
        f"-{size.replace('=', '').replace(',', '-')}-" in task.id for task in first for size in [task.spec["params"]]
    )
    with pytest.raises(UserError, match="no policy was trained"):
        drawn("second", "games.focus=first")
    trained(tmp_path / "first", first, lambda params: "numLocations=2" in params)
    second = drawn("second", "games.focus=first", "seed=1")
    assert len(second) == 5
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    assert drawn("second", "games.focus=first", "seed=1") == second, "what was drawn is kept"
    assert len(drawn("second", "games.focus=elsewhere", "seed=1")) == 5
    assert len(drawn("second", "seed=1")) == 5
    with pytest.raises(UserError, match="nowhere is no run"):
        drawn("third", "games.focus=nowhere")


def test_tasks_of_any_world_can_be_asked_where_a_policy_fails(tmp_path: Path) -> None:
    """TextWorld writes ``games.json`` in a way of its own; a variation of ALFWorld is a number."""
    first = RunFolder(tmp_path / "first", 0)
    first.games.mkdir()
    (first.games / "games.json").write_text('{"settings": {}, "splits": {"train": ["tw-1"], "heldout": ["tw-2"]}}')
    words = ["games.focus=first", f"output={tmp_path}"]
    with pytest.raises(UserError, match="no policy was trained"):
        generate_tasks(load_config(words, Config), RunFolder(tmp_path / "second", 0))
    spec: dict[str, Any] = {"path": "game", "variation": 2}
    assert failure_weights([spec], [(spec, False)]) == [1.0]
