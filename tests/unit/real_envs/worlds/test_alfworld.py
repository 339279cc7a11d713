"""ALFWorld's own game files, where they lie beside the project. If these fail, other households decide."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from real_envs.env import StepResult
from real_envs.worlds.alfworld import (
    GAME,
    Alfworld,
    AlfworldGame,
    AlfworldSettings,
    Names,
    Translations,
    clean,
    world_facts,
)
from real_envs.worlds.alfworld_plans import SPOT, AlfworldGoal, Facts, commands, count_places, read_goal, search
from real_envs.worlds.alfworld_variations import NoVariation, vary
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused

DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "alfworld"
PROBLEM = """(:init (receptacleType Desk_bar__plus_02_dot_32 DeskType)
(inReceptacle Mug_bar__minus_01 Desk_bar__plus_02_dot_32)
(inReceptacle Mug_bar__plus_03 Drawer_bar__plus_01) (receptacleAtLocation Desk_bar__plus_02_dot_32 loc_bar_8_bar_2))"""

played = pytest.mark.skipif(not DATA.is_dir(), reason="the games of ALFWorld are not beside this checkout")


@pytest.fixture
def planner() -> None:
    pytest.importorskip("fast_downward", reason="pip install 'imagination[alfworld]'")


def test_things_are_numbered_by_kind_in_the_order_of_their_coordinates() -> None:
    names = Names(PROBLEM)
    assert names.things == ["desk 1", "drawer 1", "mug 1", "mug 2"]
    text = "You arrive at loc_bar_8_bar_2. On the desk_bar__plus_02_dot_32, you see a mug_bar__minus_01."
    assert clean(names.plain(text)) == "On the desk 1, you see a mug 1."
    assert names.raw("take mug 2 from drawer 1") == "take mug_bar__plus_03 from drawer_bar__plus_01"
    assert names.raw("take mug 9 from lake 1") == "take mug 9 from lake 1"  # the game then says that nothing happens
    asked = PROBLEM + "(:goal (and (inReceptacle ?o ?r)))"
    assert world_facts(PROBLEM) == world_facts(asked) == ("desk 1: mug 1", "drawer 1: mug 2")
    more = PROBLEM.replace("(:init", "(:init (openable Drawer_bar__plus_01) (receptacleType Bed_bar_1 BedType)")
    more = more.replace("loc_bar_8_bar_2)", "loc_bar_8_bar_2) (receptacleAtLocation Bed_bar_1 loc_bar_8_bar_2)")
    places = ("bed 1: nothing", "desk 1: mug 1", "drawer 1 (closed): mug 2")
    assert world_facts(more) == (*places, "at one spot: bed 1, desk 1")


PLACED = "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (objectType ?o MugType) "
PLACED += "(receptacleType ?r DeskType) {more}"
HOUSE = [tuple(fact.split()) for fact in (
    "objecttype mug_1 mugtype", "objecttype mug_2 mugtype", "objecttype pen_1 pentype",
    "objecttype lamp_1 desklamptype", "receptacletype drawer_1 drawertype", "receptacletype desk_1 desktype",
    "receptacletype sink_1 sinkbasintype", "receptacleatlocation drawer_1 loc_1", "receptacleatlocation desk_1 loc_2",
    "receptacleatlocation sink_1 loc_3", "inreceptacle mug_1 drawer_1", "inreceptacle mug_2 sink_1",
    "inreceptacle lamp_1 desk_1", "openable drawer_1", "atlocation agent loc_9",
)]  # fmt: skip


def test_goals_of_all_shapes_are_read() -> None:
    assert read_goal(f"(:goal (and {PLACED.format(more='')}") == AlfworldGoal("mugtype", "desktype")
    cleaned = read_goal(f"(:goal (and {PLACED.format(more='(isClean ?o)')}")
    assert cleaned == AlfworldGoal("mugtype", "desktype", change="clean")
    two = read_goal(f"(:goal (and {PLACED.format(more='(objectType ?o2 MugType) (receptacleType ?r DeskType)')}")
    assert two == AlfworldGoal("mugtype", "desktype", count=2)
    lit = "(:goal (and (objectType ?ot DeskLampType) (isToggled ?ot) (objectType ?o PenType) (holds ?a ?o)"
    assert read_goal(lit) == AlfworldGoal("pentype", lamp="desklamptype")
    assert read_goal("(:goal (and (opened ?r)))") is None


def test_a_plan_is_written_from_any_state() -> None:
    brought = ["go to sink_1", "take mug_2 from sink_1", "go to desk_1", "put mug_2 in/on desk_1"]
    assert commands(AlfworldGoal("mugtype", "desktype"), Facts(HOUSE)) == brought
    more = ["go to drawer_1", "open drawer_1", "take mug_1 from drawer_1", "go to desk_1", "put mug_1 in/on desk_1"]
    assert commands(AlfworldGoal("mugtype", "desktype", count=2), Facts(HOUSE)) == brought + more
    clean_it = [*brought[:2], "clean mug_2 with sink_1", *brought[2:]]  # it is at the sink already
    assert commands(AlfworldGoal("mugtype", "desktype", change="clean"), Facts(HOUSE)) == clean_it
    # another thing is in the hand, and the drawer stands open before us
    aside = [fact for fact in HOUSE if fact[0] != "atlocation"]
    aside += [("atlocation", "agent", "loc_1"), ("opened", "drawer_1"), ("holds", "agent", "pen_1")]
    assert commands(AlfworldGoal("mugtype", "desktype"), Facts(aside)) == ["put pen_1 in/on drawer_1", *brought]
    held = [*HOUSE, ("holds", "agent", "pen_1")]
    assert commands(AlfworldGoal("pentype", lamp="desklamptype"), Facts(held)) == ["go to desk_1", "use lamp_1"]
    assert commands(AlfworldGoal("pentype", "desktype"), Facts(HOUSE)) == []  # the pen is nowhere
    assert commands(AlfworldGoal("mugtype", "bedtype"), Facts(HOUSE)) == []


def test_the_expert_looks_for_what_it_has_not_seen_where_such_things_were_elsewhere() -> None:
    facts = ("drawer 7 (closed): mug 3", "drawer 2: mug 1", "sinkbasin 1: mug 1", "desk 1: pen 1", "bed 1: nothing")
    usual = count_places([*facts, "at one spot: bed 1, desk 1"])
    assert usual == {("mug", "drawer"): 2, ("mug", "sinkbasin"): 1, ("pen", "desk"): 1}
    goal, house = AlfworldGoal("mugtype", "desktype"), Facts(HOUSE)
    assert search(goal, house, set(), usual) == ["go to drawer_1", "open drawer_1"]
    assert search(goal, house, {"drawer_1"}, usual) == commands(goal, Facts([f for f in HOUSE if f[1] != "mug_2"]))
    assert search(goal, house, {"desk_1"}, {}) == ["go to drawer_1", "open drawer_1"]
    two, seen = AlfworldGoal("mugtype", "desktype", count=2), {"sink_1"}
    assert search(two, house, seen, usual)[-1] == "put mug_2 in/on desk_1"  # the first, before the second is found
    assert search(AlfworldGoal("pentype", lamp="desklamptype"), house, {*house.at}, usual) == []  # the pen is nowhere
    at_drawer = [*(fact for fact in HOUSE if fact[0] != "atlocation"), ("atlocation", "agent", "loc_1")]
    assert Facts(at_drawer).in_sight() == []
    assert Facts([*at_drawer, ("opened", "drawer_1")]).in_sight() == ["drawer_1"]


ROOM = """(:init (receptacleType Desk_1 DeskType) (receptacleType Drawer_1 DrawerType)
(receptacleType Drawer_2 DrawerType) (receptacleAtLocation Desk_1 loc_1) (receptacleAtLocation Drawer_1 loc_2)
(receptacleAtLocation Drawer_2 loc_3) (canContain DeskType MugType) (canContain DeskType PenType)
(canContain DrawerType PenType) (canContain DrawerType CdType) (objectType Mug_1 MugType) (objectType Pen_1 PenType)
(objectType Cd_1 CdType) (pickupable Mug_1) (pickupable Pen_1) (pickupable Cd_1) (inReceptacle Mug_1 Desk_1)
(inReceptacle Pen_1 Drawer_1) (inReceptacle Cd_1 Drawer_2) (objectAtLocation Mug_1 loc_1)
(objectAtLocation Pen_1 loc_2) (objectAtLocation Cd_1 loc_3))"""


def test_a_variation_moves_things_to_where_they_may_be_and_asks_for_another() -> None:
    asked = "(:goal (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DrawerType)))"
    game = {"pddl_problem": ROOM + asked, "grammar": '"rhs": "Your task is to: put some mug in drawer." a mug'}
    varied = [vary(game, number) for number in range(1, 40)]
    assert varied[:3] == [vary(game, number) for number in (1, 2, 3)]
    assert len({v["pddl_problem"] for v in varied}) > 2
    for one in varied:
        init, _, goal = one["pddl_problem"].partition("(:goal")
        inside = dict(re.findall(r"\(inReceptacle (\w+) (\w+)\)", init))
        at = dict(re.findall(r"\(objectAtLocation (\w+) (\w+)\)", init))
        assert inside["Mug_1"] == "Desk_1"  # no drawer may hold one
        assert inside["Cd_1"].startswith("Drawer")
        assert all(f"(receptacleAtLocation {place} {at[thing]})" in init for thing, place in inside.items())
        kinds = re.findall(r"(\w+)Type\)", goal)
        assert one["grammar"] == '"rhs": "Your task is to: put some {} in {}." a mug'.format(*map(str.lower, kinds))
        assert tuple(kinds) in {("Pen", "Desk"), ("Pen", "Drawer")}  # a CD is in a drawer already, a mug on the desk
        assert not inside["Pen_1"].startswith(kinds[1])
    with pytest.raises(NoVariation):
        vary({**game, "pddl_problem": ROOM + "(:goal (opened ?r))"}, 1)
    with pytest.raises(NoVariation):
        vary({**game, "pddl_problem": ROOM.replace("pickupable", "heatable") + asked}, 1)


@played
def test_variations_are_further_training_games_that_can_be_solved(planner: None, tmp_path: Path) -> None:
    first = sorted((DATA / "valid_train").rglob(GAME))[0]
    shutil.copytree(first.parent, tmp_path / "data" / "train" / "kind" / "trial")
    settings = AlfworldSettings(data=str(tmp_path / "data"), variations=2)
    tasks = generated(Alfworld(), tmp_path / "games", {"train": 3}, settings)
    asyncio.run(tasks.close())
    game, starts = AlfworldGame(privileged=True), set()
    for task in tasks.tasks("train"):
        start = game.reset(task)
        starts.add(start.text)
        assert by_plan(game, start, 100)[-1].reward == 1.0
    assert [t.id for t in tasks.tasks("train")] == [f"alfworld/train/kind/trial{k}" for k in ("", "/1", "/2")]
    assert len(starts) == len({t.world_facts for t in tasks.tasks("train")}) == 3
    game.close()


def test_a_game_is_translated_once() -> None:
    asked: list[str] = []

    def translate(domain: str, problem: str, verbose: bool) -> tuple[str, str]:
        asked.append(problem)
        return f"task of {problem}", f"sas of {problem}"

    known = Translations(translate)
    for _ in range(2):
        assert known("domain", "a") == known("domain", "a", verbose=False, optimize=True) == ("task of a", "sas of a")
        assert known("domain", "b")[1] == "sas of b"
    assert asked == ["a", "b"]


def test_what_is_wrong_with_the_games_is_said(planner: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(count: int = 1, **settings: str) -> object:
        return generated(Alfworld(), tmp_path / "games", {"train": count}, AlfworldSettings(**settings))

    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    refused(make, "ALFWorld", "env.options.data")
    here = str(tmp_path)
    refused(lambda: make(data=here), "train", here)
    torn = tmp_path / "train" / "pick_and_place_simple-Mug" / "trial_T1" / GAME
    torn.parent.mkdir(parents=True)
    torn.write_text('{"pddl_problem": "(define')
    refused(lambda: make(data=here), str(torn), "JSONDecodeError")
    torn.write_text(json.dumps({"pddl_problem": PROBLEM}))
    refused(lambda: make(2, data=here), "1 games", "games.train=2", "env.options.variations")
    refused(lambda: AlfworldSettings(train="train+valid_seen"), "valid_seen", error=ValueError)
    assert not (tmp_path / "games" / "games.json").exists()


@played
def test_the_plan_solves_and_splits_do_not_meet(planner: None, tmp_path: Path) -> None:
    settings = AlfworldSettings(data=str(DATA), train="train+valid_train")
    tasks = generated(Alfworld(), tmp_path, {"train": 3, "heldout": 2}, settings)
    train, heldout = tasks.tasks("train"), tasks.tasks("heldout")
    asyncio.run(tasks.close())
    assert len({t.id for t in (*train, *heldout)}) == 5
    assert all("/valid_seen/" in t.id for t in heldout)
    assert not any("/valid_seen/" in t.id for t in train)
    game = AlfworldGame(privileged=True)
    results: list[StepResult]
    for task in (train[0], heldout[0]):
        start = game.reset(task)
        results = by_plan(game, start)
        assert "task is to:" in start.text
        places = [fact for fact in task.world_facts if not fact.startswith(SPOT)]
        assert all(fact.partition(":")[0].removesuffix(" (closed)") in start.text for fact in places)
        assert not any("_bar_" in seen.text for seen in (start, *(r.observation for r in results)))
        assert results[-1].terminated
        assert [r.reward for r in results if r.reward] == [results[-1].reward] == [1.0]
    refused(lambda: game.step("look"), "reset", error=RuntimeError)
    observation, rng = game.reset(train[1]), random.Random(0)
    for _ in range(15):  # whatever was done before, the plan is one from where one stands
        observation = game.step(rng.choice(observation.privileged["admissible_commands"])).observation  # type: ignore[arg-type]
    last = by_plan(game, observation, 60)[-1]
    assert (last.terminated, last.reward) == (True, 1.0)
    assert game.reset(heldout[0]).text == game.reset(heldout[0]).text
    assert game.step("dance with mug 1").observation.text == "Nothing happens."
    game.close()


@played
def test_it_keeps_the_protocol(planner: None, tmp_path: Path) -> None:
    tasks = generated(Alfworld(), tmp_path, {"train": 1}, AlfworldSettings(data=str(DATA)))
    game = AlfworldGame(privileged=True)
    plan: list[str] = []
    observation = game.reset(tasks.tasks("train")[0])
    while commands := observation.privileged["policy_commands"]:
        plan.append(commands[0])  # type: ignore[index]
        observation = game.step(plan[-1]).observation
    game.close()
    assert findings(tasks, ["look", "go to the moon", *plan]) == []
