from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import real_envs.worlds.textworld as module
from real_envs.env import Task
from real_envs.worker_pool import PooledTasks
from real_envs.worlds.textworld import REFUSAL, GameSettings, TextWorld, TextWorldGame, clean, generate_games
from tests.support.played import findings

NASTY = [
    "", "  ", "\x00", "a\x00b", "look\ninventory", "\x1b[A", 'say "hello', "quit", "Q", "restart", "save", "restore",
    "undo", "script", "again", "g", "oops key", "score", "superbrief", "open.quit", "look. quit", "look, quit",
    "look then quit", "tw-extra-infos description", "print_state", "restrict commands", "öffne", "look " * 50,
    "\\",  # a command to the interpreter itself, which then prints without end
]  # fmt: skip


def play(game: TextWorldGame, task: Task, commands: list[str]) -> list[tuple[str, float | None, bool]]:
    seen: list[tuple[str, float | None, bool]] = [(game.reset(task).text, None, False)]
    for command in commands:
        result = game.step(command)
        seen.append((result.observation.text, result.reward, result.terminated))
        if result.terminated:
            break
    return seen


def plan_of(task: Task) -> list[str]:
    game = TextWorldGame(privileged=True)
    plan = game.reset(task).privileged["policy_commands"]
    game.close()
    assert isinstance(plan, list)
    return plan


def test_clean_drops_prompt_status_line_banner_and_move_count() -> None:
    won = (
        "\nYou close the bureau.\n\n\nYour score has just gone up by one point.\n\n\n        *** The End ***\n\n"
        "You scored 1 out of a possible 1, in 3 turns.\n\n\n"
        "Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command?\n>      -= Studio =-0/2"
    )
    assert clean(won) == "You close the bureau.\nYour score has just gone up by one point.\n*** The End ***"
    start = "\n  \\$$   \\$$$$$$ \n\nYour task is to win.\n\n-= Den =-\nA  den.\n\n>       -= Den =-0/1"
    assert clean(start) == "Your task is to win.\n-= Den =-\nA den."


def test_expert_wins_with_total_reward_one(games: list[Task]) -> None:
    for task in games:
        plan = plan_of(task)
        assert len(plan) == 3
        seen = play(TextWorldGame(), task, plan)
        assert seen[-1][2]
        assert "*** The End ***" in seen[-1][0]
        assert [reward for _, reward, _ in seen[1:]] == [0.0, 0.0, 1.0]
        start = seen[0][0]
        assert "-=" in start
        assert "$$" not in start
        assert not start.startswith("-=")  # the objective comes first


def test_nasty_commands_are_ordinary_steps_that_change_nothing(games: list[Task]) -> None:
    plan = plan_of(games[0])
    plain = play(TextWorldGame(), games[0], plan)
    game = TextWorldGame()
    game.reset(games[0])
    before = sorted(Path.cwd().iterdir())
    for k, command in enumerate(plan):
        for nasty in NASTY:
            started = time.monotonic()
            result = game.step(nasty)
            assert time.monotonic() - started < 0.5
            assert (result.observation.text, result.reward) == (REFUSAL, 0.0), nasty
            assert not result.terminated
            assert "refused" in result.info
        result = game.step(command)
        assert (result.observation.text, result.reward, result.terminated) == plain[k + 1]
    assert sorted(Path.cwd().iterdir()) == before  # "save" and "script" write files if they get through


def test_refusal_is_what_the_game_says_to_unknown_verbs(games: list[Task]) -> None:
    game = TextWorldGame()
    game.reset(games[0])
    assert game.step("frobnicate the key").observation.text == REFUSAL


def test_a_question_of_the_parser_is_not_answered_by_the_next_command(games: list[Task]) -> None:
    """Otherwise what a command does would depend on whether the last one was incomplete."""
    game = TextWorldGame(privileged=True)
    asked = 0
    for task in games:
        entities = game.reset(task).privileged["entities"]
        assert isinstance(entities, list)
        for verb in ("take", "open", "unlock", "drop"):
            question = play(game, task, [verb])[-1][0]
            if not question.endswith("?"):
                continue  # where there is but one thing at hand, Inform takes it to be meant
            asked += 1
            for reply in [*entities, "north", "the key"]:
                assert play(game, task, [verb, reply])[-1] == play(game, task, [reply])[-1]
    assert asked


def test_privileged_infos_change_no_text_and_are_absent_unless_asked_for(games: list[Task]) -> None:
    watched, plain = TextWorldGame(privileged=True), TextWorldGame()
    rng = random.Random(0)
    for task in games:
        observation = watched.reset(task)
        assert set(observation.privileged) == {"admissible_commands", "policy_commands", "inventory", "entities"}
        commands = []
        seen: list[tuple[str, float | None, bool]] = [(observation.text, None, False)]
        for _ in range(40):
            admissible = observation.privileged["admissible_commands"]
            assert isinstance(admissible, list)
            commands.append(rng.choice([*admissible, "take", "open", "drop all", "go up", "nonsense", "wait"]))
            result = watched.step(commands[-1])
            observation = result.observation
            seen.append((observation.text, result.reward, result.terminated))
            if result.terminated:
                break
        assert play(plain, task, commands) == seen
        assert not plain.reset(task).privileged


def test_a_task_tells_the_world_model_its_initial_state(games: list[Task]) -> None:
    """Where the player and things are and how rooms connect, in names that the game's own texts use."""
    for task in games:
        (start,) = [fact for fact in task.world_facts if fact.startswith("P at ")]
        observed = TextWorldGame().reset(task).text.lower()
        assert start.removeprefix("P at ") in observed
        assert any(" of " in fact for fact in task.world_facts)
        assert not any(re.search(r"\b[a-z]_\d", fact) for fact in task.world_facts), "an id in place of a name"


def test_step_needs_a_running_game(games: list[Task]) -> None:
    game = TextWorldGame()
    with pytest.raises(RuntimeError):
        game.step("look")
    play(game, games[0], plan_of(games[0]))
    with pytest.raises(RuntimeError):
        game.step("look")


def test_cached_games_restart_from_the_beginning_also_after_eviction(games: list[Task]) -> None:
    game = TextWorldGame(cached_games=1)
    plans = [plan_of(task) for task in games]
    first = [play(game, task, plan) for task, plan in zip(games, plans, strict=True)]
    assert [play(game, task, plan[:1] + plan) for task, plan in zip(games, plans, strict=True)] != first
    assert [play(game, task, plan) for task, plan in zip(games, plans, strict=True)] == first
    assert first[0][0] != first[1][0]


def test_generation_skips_bad_seeds_and_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {1: "a", 2: None, 3: "a", 4: "d", 2 + 1_000_003: "b", 3 + 1_000_003: "b", 3 + 2_000_006: "c"}
    monkeypatch.setattr(module, "_build", lambda seed, folder, settings: starts[seed])
    progress = []
    tasks = generate_games(
        tmp_path, [1, 2, 3, 4], GameSettings(4, 6, 5), lambda done, total: progress.append((done, total)), workers=1
    )
    assert [task.id for task in tasks] == [f"tw-r4-o6-q5-s{s}" for s in (1, 1_000_005, 2_000_009, 4)]
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    starts.update({s + k * 1_000_003: None for s in (2,) for k in range(21)})
    with pytest.raises(ValueError, match="no new game"):
        generate_games(tmp_path, [2], workers=1)


def test_the_highest_seed_of_a_run_gives_games(tmp_path: Path) -> None:
    highest = 1 + (2**32 - 1) * 10_000
    assert [t.id for t in generate_games(tmp_path, [highest], GameSettings(2, 3, 2))] == [f"tw-r2-o3-q2-s{highest}"]


def test_manifest_restores_the_task_set_where_the_folder_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_build", lambda seed, folder, settings: str(seed))
    world = TextWorld()
    world.generate(tmp_path / "a", {"train": 2, "test": 1}, 0, GameSettings(), lambda done, total: None, 1)
    (tmp_path / "a").rename(tmp_path / "b")
    loaded = world.open(tmp_path / "b", privileged=False, workers=1)
    assert [task.id for task in loaded.tasks("train")] == ["tw-r4-o6-q5-s1", "tw-r4-o6-q5-s2"]
    assert loaded.tasks("test")[0].spec["path"] == str(tmp_path / "b" / "tw-r4-o6-q5-s3.z8")
    with pytest.raises(KeyError):
        loaded.tasks("valid")
    with pytest.raises(FileNotFoundError):
        world.open(tmp_path, privileged=False, workers=1)


def test_more_training_games_leave_the_held_out_ones_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_build", lambda seed, folder, settings: str(seed))

    def seeds_of(train: int, heldout: int, seed: int = 0) -> dict[str, list[int]]:
        world, counts = TextWorld(), {"train": train, "heldout": heldout}
        world.generate(tmp_path, counts, seed, GameSettings(), lambda done, total: None, 1)
        tasks = world.drawn(tmp_path)[1]
        return {split: [int(task.id.rpartition("-s")[2]) for task in some] for split, some in tasks.items()}

    assert seeds_of(2, 2) == {"train": [1, 2], "heldout": [3, 4]} == seeds_of(2, 2)
    assert seeds_of(4, 3) == {"train": [1, 2, 5, 6], "heldout": [3, 4, 7]}
    assert seeds_of(2, 2) == {"train": [1, 2], "heldout": [3, 4]}
    assert seeds_of(2, 1, seed=1) == {"train": [10_001, 10_002], "heldout": [10_003]}


def test_finished_games_are_kept(games: list[Task]) -> None:
    files = [Path(task.spec["path"]) for task in games]
    written = [file.stat().st_mtime_ns for file in files]
    settings = GameSettings(rooms=2, objects=4, quest_length=3)
    assert generate_games(files[0].parent, [1, 2], settings, workers=2) == games
    assert [file.stat().st_mtime_ns for file in files] == written
    about = json.loads(files[0].with_suffix(".json").read_text())
    assert about["metadata"]["start"] == play(TextWorldGame(), games[0], [])[0][0]


def test_conforms_to_the_protocol_in_a_worker(games: list[Task]) -> None:
    tasks = PooledTasks({"train": games}, TextWorldGame, workers=1)
    assert findings(tasks, plan_of(games[0])) == []
    assert tasks.pool.stats.crashes == tasks.pool.stats.timeouts == 0


def test_a_script_without_a_guard_is_not_run_again_by_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from real_envs.worlds.textworld import _map\nprint(list(_map(abs, [1, -2], 2)))\n")
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=here, check=True)
    assert done.stdout == "[1, 2]\n"
