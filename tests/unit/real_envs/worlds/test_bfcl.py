"""BFCL's own APIs and tasks, where the package is here. If these fail, tool calls are judged otherwise than there."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_envs.calls import Call, parse_call
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.scripted_agents import mixture
from real_envs.trajectory import Observation, Turn
from real_envs.worlds.bfcl import LANGUAGE, Bfcl, BfclGame, BfclSettings, is_heldout
from real_envs.worlds.bfcl_declared import is_answered, refusal, user_answer
from real_envs.worlds.bfcl_drawn import HELD_OUT, DrawnTasks
from real_envs.worlds.bfcl_tasks import CHANGING, REFUSED, BfclTask, Package, entities, refused
from real_envs.worlds.generated import TaskRequest
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused as raises

KINDS = ("base", "miss_func", "miss_param", "long_context")


def folder_of() -> Path | None:
    try:
        return BfclSettings().folder
    except UserError:
        return None


FOLDER = folder_of()
needs_package = pytest.mark.skipif(FOLDER is None, reason="bfcl-eval is not here: see env=bfcl in `imagine doctor`")


@pytest.fixture(scope="module")
def package() -> Package:
    assert FOLDER is not None
    return Package(FOLDER)


@pytest.fixture(scope="module")
def game() -> BfclGame:
    assert FOLDER is not None
    return BfclGame(FOLDER)


def played(game: BfclGame, task: BfclTask, left_out: tuple[int, int] | None = None) -> list[Any]:
    """The true calls of each turn and ``done()``, but for the call that is left out."""
    game.reset(Task("t", {"task": task.write()}))
    results = []
    for turn, user in enumerate(task.turns):
        calls = [call for k, call in enumerate(user.calls) if (turn, k) != left_out]
        for action in [*calls, "done()"]:
            results.append(game.step(action))
            if results[-1].terminated:
                return results
    return results


def reward(results: list[Any]) -> float:
    return sum(result.reward for result in results)


@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_the_true_calls_solve_each_task(kind: str, package: Package, game: BfclGame) -> None:
    tasks = package.originals(kind)
    assert len(tasks) == (199 if kind == "miss_func" else 200)
    for task in tasks:
        results = played(game, task)
        assert len(results) == sum(len(turn.calls) + 1 for turn in task.turns), task.number
        assert reward(results) == pytest.approx(1.0), task.number
        assert sum(result.reward > 0 for result in results) == len(task.turns)  # each turn pays its part


@needs_package
def test_without_a_call_that_changes_the_state_no_task_is_solved(package: Package, game: BfclGame) -> None:
    """The first call after which the public state is another one; what only looks may have been seen before."""
    tried = 0
    for task in package.originals("base"):
        apis = package.load(task)
        for turn, k in ((turn, k) for turn, user in enumerate(task.turns) for k in range(len(user.calls))):
            before = apis.copy()
            apis.answer(parse_call(task.turns[turn].calls[k]))
            if not before.same_state(apis):
                assert reward(played(game, task, (turn, k))) < 0.999, (task.number, turn, k)
                tried += 1
                break
    assert tried > 150


@needs_package
def test_a_wrong_end_of_a_turn_ends_the_episode_and_keeps_what_was_earned(package: Package, game: BfclGame) -> None:
    task = package.originals("base")[0]
    game.reset(Task("t", {"task": task.write()}))
    for call in task.turns[0].calls:
        assert (game.step(call).reward, game.step("pwd()").terminated) == (0.0, False)  # looking is free
    fulfilled = game.step("I have moved it.")  # any text ends a turn
    assert (fulfilled.reward, fulfilled.terminated) == (0.25, False)
    assert fulfilled.observation.text == f"User: {task.turns[1].request}"
    failed = game.step("done()")
    assert (failed.reward, failed.terminated, failed.truncated) == (0.0, True, False)
    raises(lambda: game.step("pwd()"), "reset first", error=RuntimeError)


@needs_package
def test_answers_are_the_apis_own_and_what_is_wrong_with_a_call_is_said(package: Package, game: BfclGame) -> None:
    task = package.originals("base")[0]
    start = game.reset(Task("t", {"task": task.write()})).text
    assert f"User: {task.turns[0].request}" in start
    assert "\nmv(source: str, destination: str)\n" in start
    assert "\ncp(" not in start, "the benchmark takes this tool away here"

    def said(action: str) -> str:
        result = game.step(action)
        assert (result.reward, result.terminated) == (0.0, False)
        return result.observation.text

    assert said("pwd()") == '{"current_working_directory": "/workspace"}'
    assert said('{"name": "cd", "arguments": {"folder": "nowhere"}}').startswith('{"error": "cd: ')
    for action, named in {
        "cd()": "folder",
        "cd(folder='a', depth=2)": "depth",
        "cp(source='a', destination='b')": "'cp'",
        "_load_scenario(scenario={})": "'_load_scenario'",
        "eval('1')": "'eval'",
        "cd(folder=open('a'))": "literals",
        "tail(file_name='final_report.pdf', lines='many')": "",
    }.items():
        answer = said(action)
        assert re.match(REFUSED, answer), answer
        assert named in answer
    for call in task.turns[0].calls:
        assert not refused(said(call))
    assert game.step("done()").reward == 0.25, "nothing of what was refused did anything"


@needs_package
def test_a_tool_that_is_missing_comes_with_its_turn(package: Package, game: BfclGame) -> None:
    task = package.originals("miss_func")[0]
    assert "\nsort(" not in game.reset(Task("t", {"task": task.write()})).text
    turn = next(k for k, user in enumerate(task.turns) if user.tools)
    for user in task.turns[:turn]:
        for call in user.calls:
            game.step(call)
        assert refused(game.step("sort('final_report.pdf')").observation.text)
        brought = game.step("done()").observation.text
    assert brought.startswith("sort(file_name: str)\nUser: ")


@needs_package
def test_drawn_tasks_are_solved_by_their_true_calls_and_differ(package: Package, game: BfclGame) -> None:
    drawn, again = DrawnTasks(package), DrawnTasks(package)
    changed: Counter[str] = Counter()
    for task in package.originals("base")[::4]:
        made = drawn.draw(task, 7)
        if made is None:
            changed["nothing"] += 1
            continue
        assert made == again.draw(task, 7), "the same seed makes the same task"
        assert not any(refused(answer) for said in package.replay(made).answers for answer in said)
        assert reward(played(game, made)) == pytest.approx(1.0), task.number
        # the original's calls do not do: new names stand in what they name
        names = [(a.calls, b.calls) for a, b in zip(task.turns, made.turns, strict=True)]
        changed["calls"] += any(old != new for old, new in names)
        changed["requests"] += any(a.request != b.request for a, b in zip(task.turns, made.turns, strict=True))
        assert made.config != task.config or any(old != new for old, new in names)
        assert [[parse_call(c).name for c in t.calls] for t in made.turns] == [
            [parse_call(c).name for c in t.calls] for t in task.turns
        ]
    assert changed["calls"] > 25
    assert changed["requests"] > 25
    assert changed["nothing"] < 10


@needs_package
def test_folds_share_no_original_for_any_seed(tmp_path: Path) -> None:
    def numbers(seed: int, **settings: str) -> dict[str, list[int]]:
        counts = {"train": 170, "heldout": 45}
        drawn = Bfcl().draw(BfclSettings(**settings), TaskRequest(counts, seed, lambda done, total: None))  # type: ignore[arg-type]
        read = {split: [BfclTask.read(one["task"]) for one in tasks] for split, tasks in drawn.items()}
        assert all(len({task.write() for task in tasks}) == counts[split] for split, tasks in read.items())
        if api := settings.get("heldout_api"):
            assert all(api in task.apis for task in read["heldout"])
            assert not any(api in task.apis for task in read["train"])
        return {split: [task.number for task in tasks] for split, tasks in read.items()}

    first, second = numbers(0), numbers(1)
    for splits in (first, second):
        assert all(map(is_heldout, splits["heldout"]))
        assert not any(map(is_heldout, splits["train"]))
    assert first == numbers(0)
    assert first["train"] != second["train"]
    held = numbers(0, heldout_api="TravelAPI")
    assert not set(held["train"]) & (set(held["heldout"]) | set(first["heldout"]))


@needs_package
def test_held_out_states_are_of_the_same_originals_and_share_no_name_with_training() -> None:
    counts = {"train": 60, "heldout": 30}
    settings = BfclSettings(apis="TradingBot", heldout="states")
    drawn = Bfcl().draw(settings, TaskRequest(counts, 0, lambda done, total: None))
    read = {split: [BfclTask.read(one["task"]) for one in tasks] for split, tasks in drawn.items()}
    assert {task.number for task in read["heldout"]} <= {task.number for task in read["train"]}
    words = {
        split: {w.lower() for t in tasks for w in re.findall("[A-Za-z]+", t.write())} for split, tasks in read.items()
    }
    own = set(HELD_OUT)
    assert own & words["heldout"]
    originals = {w.lower() for w in re.findall("[A-Za-z]+", "".join(t.write() for t in read["train"][:20]))}
    assert not own & words["train"] - originals
    new = words["train"] - originals
    assert len(new) > 150, "few names are learned by heart"


@needs_package
def test_a_split_that_has_not_so_many_tasks_says_so(tmp_path: Path) -> None:
    def make(count: int, **settings: str) -> object:
        return generated(Bfcl(), tmp_path / "games", {"train": count}, BfclSettings(**settings))  # type: ignore[arg-type]

    raises(lambda: make(1000, apis="MathAPI"), "games.train=1000")


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    raises(lambda: BfclSettings(heldout_api="MailAPI"), "MailAPI", error=ValueError)
    raises(lambda: BfclSettings(heldout_api="MathAPI", heldout="states"), "heldout=states", error=ValueError)
    raises(lambda: BfclSettings(package=str(tmp_path)).folder, str(tmp_path), "pip install --no-deps --target")


@needs_package
def test_the_environment_keeps_the_protocol(tmp_path: Path) -> None:
    tasks = generated(Bfcl(), tmp_path, {"train": 1}, BfclSettings())
    task = tasks.tasks("train")[0]
    calls = [action for turn in BfclTask.read(task.spec["task"]).turns for action in [*turn.calls, "done()"]]
    assert findings(tasks, calls, task) == []
    assert task.world_facts[0].startswith("calls 1: ")
    assert not set(task.world_facts) & set(Bfcl().task({"id": "x", "task": task.spec["task"]}, {}).spec.values())


def acts(game: BfclGame, agent: Any, observation: Observation, seed: int) -> Iterator[tuple[str, Any]]:
    """What an agent does in at most 25 turns, and what came of it."""
    actor = agent.start(observation, seed)
    for _ in range(25):
        action = asyncio.run(actor.act())
        result = game.step(action)
        yield action, result
        if result.terminated:
            break
        actor.observe(result.observation)


@needs_package
def test_experts_go_on_after_a_step_aside_and_others_err(package: Package) -> None:
    assert FOLDER is not None
    game = BfclGame(FOLDER, privileged=True)
    task = Task("t", {"task": package.originals("base")[0].write()})
    start = game.reset(task)
    plan = start.privileged["policy_commands"]
    aside = game.step("cd(folder='archive')").observation
    assert aside.privileged["policy_commands"] == ["cd(folder='..')", *plan]  # type: ignore[misc]
    assert reward(by_plan(game, aside)) == pytest.approx(1.0)

    solved: Counter[str] = Counter()
    answers: list[str] = []
    agents = [agent for agent, _ in mixture((), LANGUAGE)]
    for number, original in enumerate(package.originals("base")[::10]):
        for agent in agents:
            start = game.reset(Task("t", {"task": original.write()}))
            results = [result for _, result in acts(game, agent, start, number)]
            answers += [result.observation.text for result in results]
            solved[agent.name] += reward(results) > 0.999
    assert solved["expert"] == 20 > max(n for name, n in solved.items() if name != "expert") > 0
    assert 0.1 < sum(map(refused, answers)) / len(answers) < 0.7
    for kind in ("there is no tool", "argument", "no call", '{"error"'):
        assert any(kind in answer for answer in answers), kind


@needs_package
def test_in_every_other_task_experts_list_a_folder_before_they_use_what_is_in_it(package: Package) -> None:
    assert FOLDER is not None
    game = BfclGame(FOLDER, privileged=True)
    looked: Counter[bool] = Counter()
    for original in package.originals("base")[:60]:
        start = game.reset(Task("t", {"task": original.write()}))
        results = by_plan(game, start)
        true_calls = sum(len(turn.calls) + 1 for turn in original.turns)
        looked[len(results) > true_calls] += 1
        assert reward(results) == pytest.approx(1.0), original.number
    assert min(looked[True], looked[False]) > 10


@needs_package
def test_an_instance_is_copied_with_its_chance(package: Package) -> None:
    task = next(task for task in package.originals("base") if "TravelAPI" in task.apis)
    apis = package.load(task)
    call = Call("authenticate_travel", {}, ("a", "b", "c", "read", "Ann", "Lee"))
    assert apis.copy().answer(call) == apis.answer(call)


@needs_package
@pytest.mark.parametrize("kind", ["base", "long_context"])
def test_what_an_episode_does_is_no_part_of_the_next_one(kind: str, package: Package) -> None:
    """It would begin poorer than its true calls did, which then solve nothing."""
    task = next(task for task in package.originals(kind) if "TravelAPI" in task.apis)
    cards = [package.load(task).instances["TravelAPI"].credit_card_list for _ in range(2)]
    for card in cards[0].values():
        card["balance"] -= 1.0
    assert [cards[1][name]["balance"] - card["balance"] for name, card in cards[0].items()] == [1.0] * len(cards[0])


@needs_package
def test_what_schemas_refuse_is_told_from_the_texts_of_an_episode_alone(package: Package) -> None:
    """In each turn of every scripted agent ``refusal`` says what the world said, and nothing where an API answered;
    what ``user_answer`` says by the facts is nearly always what the world says, which compares states; and what
    ``is_answered`` is sure of, no API refuses."""
    assert FOLDER is not None
    game, refusals, others, sure = BfclGame(FOLDER, privileged=True), 0, 0, 0
    same, paid = Counter[bool](), Counter[tuple[bool, bool]]()
    for number, original in enumerate([*package.originals("base")[::9], *package.originals("miss_func")[::20]]):
        facts = original.facts()
        for agent, _ in mixture((), LANGUAGE):
            start = game.reset(Task("t", {"task": original.write()}))
            history: list[Turn] = []
            for action, result in acts(game, agent, start, number):
                text = result.observation.text
                declared = refusal(start.text, history, action)
                said = text if text.startswith("Error: ") else None
                assert declared == said, action
                if is_answered(start.text, history, action, facts):
                    sure += 1
                    assert not refused(text), action
                refusals, others = refusals + (said is not None), others + (said is None)
                if answer := user_answer(start.text, history, action, facts):
                    same[answer == (text, pytest.approx(result.reward), result.terminated)] += 1
                    paid[answer[1] > 0, result.reward > 0] += 1
                else:
                    assert original.kind == "miss_func" or not (result.reward or result.terminated)
                history.append(Turn(action, text, result.reward, result.terminated))
    assert min(refusals, others, sure) > 100
    assert same[True] > 0.95 * same.total() > 200
    assert paid[True, True] > 0.97 * (paid[True, True] + paid[True, False]) > 60, "what it pays, the world pays"


def test_an_answer_that_looks_like_a_request_ends_no_turn_and_pays_nothing() -> None:
    start = "Session 1.\nls()\ncd(folder: str)\nUser: First."
    facts = ("calls 1: cd(folder='a')", "request 2: Second.", "calls 2: ls()")
    fake = Turn("ls()", "User: Second.", 0.0, False)
    assert user_answer(start, [fake], "done()", facts) == ("The user is not content.", 0.0, True)
    first = [fake, Turn("cd('a')", "{}", 0.0, False)]
    assert user_answer(start, first, "done()", facts) == ("User: Second.", 0.5, False)
    second = [*first, Turn("done()", "User: Second.", 0.5, False)]
    assert user_answer(start, second, "done()", facts) == ("The user is not content.", 0.0, True), "ls() was before"
    assert user_answer(start, [*second, Turn("ls()", "a", 0.0, False)], "I am done.", facts) == (
        "The user is content.",
        0.5,
        True,
    )
    assert user_answer(start, second, "ls()", facts) is None
    assert user_answer(start, second, "rm('a')", facts) is None
    assert user_answer(start, [], "done()", ()) is None
    assert is_answered(start, [fake], "cd('a')", facts)
    assert not is_answered(start, [fake], "cd('b')", facts)
    assert not is_answered(start, [Turn("cd('b')", "{}", 0.0, False)], "cd('a')", facts), "it is elsewhere"
    assert is_answered(start, [Turn("cd('b')", '{"error": "no b"}', 0.0, False)], "cd('a')", facts)
    assert is_answered(start, second, "ls()", facts)
    assert not is_answered(start, first, "ls()", facts), "of the second request, which has not come"
    assert not is_answered(start, [], "cd('a')", ())


@needs_package
def test_tools_that_are_not_listed_change_no_state(package: Package) -> None:
    rng = random.Random(0)
    for original in package.originals("base")[::12]:
        apis = package.load(original)
        for user in original.turns:
            for call in _random_calls(package, original, rng):
                tried = apis.copy()
                tried.answer(call)
                assert call.name in CHANGING or apis.same_state(tried), call
            for written in user.calls:
                apis.answer(parse_call(written))


def _random_calls(package: Package, task: BfclTask, rng: random.Random) -> Iterator[Call]:
    values = {"integer": 3, "number": 2.0, "boolean": True, "array": ["a"], "object": {}}
    for name, schema in package.tools(task, 0).items():
        text = rng.choice(entities(task))
        yield Call(name, {key: values.get(of["type"], text) for key, of in schema["properties"].items()})
