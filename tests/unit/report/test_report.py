"""A report must be complete, say what the numbers say, and show text of games and models as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from imagination.evaluation.compare.alignment import TurnClass, align_turns, replayed_pairs, still_true, word_diff
from imagination.report.run_data import ReportError, build_report, load_run
from imagination.report.run_page import write_report
from imagination.report.run_plots import binned, series, share_areas, trend
from imagination.report.run_text import terminal_table, verdict
from real_envs.trajectory import Turn
from tests.support.reports import TRAINED, Json, Page, page, summary, write_run

EVIL = "<script>alert('dream')</script> & <img src=x onerror=alert(1)>"


def turn(observation: str, reward: float | None = 0.0, terminated: bool = False, action: str = "go east") -> Json:
    info = {"confidence": 0.83}
    return {"action": action, "observation": observation, "reward": reward, "terminated": terminated, "info": info}


def row(id_: str, source: str, which: str, turns: list[Json], solved: bool = False, **more: Any) -> Json:
    return {
        "id": id_, "stage": "evaluate", "which": which, "split": "train", "task_id": "tw-1", "group_id": "tw-1/0",
        "source": source, "agent": "policy", "seed": 0, "start": "-= Attic =-", "turns": turns,
        "stop": "terminated" if solved else "turn_limit", "prefix_turns": 0, "solved": solved, **more,
    }  # fmt: skip


def rollouts() -> list[Json]:
    dreamed = [turn("A hall."), turn("A red lamp."), turn("The coin is yours.", 1.0, True, action="take coin")]
    played = [turn("A  hall.\n"), turn("A blue lamp."), turn("You see no coin.", action="take coin")]
    return [
        row("d0", "dream", "after", dreamed, solved=True),
        row("r0", "real", "replay", played, twin_of="d0"),
        row("e0", "real", "before", [turn(EVIL)]),
        row("e1", "real", "after", [turn("You win.", 1.0, True)], solved=True),
    ]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "my-run", summary(), rollouts(), TRAINED)
    assert write_report(folder) == folder / "report.html"
    return folder


def test_every_source_that_was_trained_on_is_in_the_picture_of_shares() -> None:
    """Without the replays the areas would not reach the top, and nothing would say what is missing."""
    shares = {"tokens_dream": 0.5, "tokens_expert": 0.2, "tokens_replay": 0.3}
    drawn = share_areas([{"stage": "train", "step": s, **shares} for s in range(9)])
    assert drawn is not None
    named = [name for name in ("dream", "real", "expert", "replay") if f">{name}<" in drawn.svg]
    assert named == ["dream", "expert", "replay"]


# report.json


def test_the_report_keeps_the_numbers_of_the_run_and_adds_what_follows(run_folder: Path) -> None:
    report = json.loads((run_folder / "report.json").read_text())
    for key, value in summary().items():
        assert report[key] == value
    assert report["optimism_gap"]["before"] == pytest.approx(87 / 256 - 20 / 64)
    assert report["optimism_gap"]["after"] == pytest.approx(179 / 256 - 41 / 64)
    assert report["twins"] == {
        "n": 1,
        "never_parted": 0,
        "false_success": 1,
        "still_true": [[0, 1, 1], [1, 1, 1], [2, 0, 1]],
    }
    assert not report["partial"]
    assert report["notes"] == []


def test_the_verdict_says_the_numbers(run_folder: Path) -> None:
    sentences = json.loads((run_folder / "report.json").read_text())["verdict"]
    # 18/64 and 26/64: by Newcombe's interval the change may be none, so it must not be called a rise
    assert "with 0 real steps: " in sentences[0]
    assert "went from 0.28 [0.19, 0.40] to 0.41 [0.29, 0.53]" in sentences[0]
    assert "may be chance" in sentences[1]
    assert "rose from 0.31 [0.21, 0.43] to 0.64 [0.52, 0.75]; the dream believed 0.70" in sentences[2]
    assert "12,400 real steps" in sentences[3]


def test_held_out_tasks_that_were_trained_on_are_not_called_unseen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {**summary(), "trained_tasks": "heldout"}, [])
    write_report(folder)
    assert "real success on held-out tasks that it trained on went" in (folder / "report.md").read_text()
    assert "never trained on" not in page(folder) + (folder / "report.md").read_text()


def test_what_the_real_world_cost_is_told_where_it_was_measured(tmp_path: Path) -> None:
    numbers = summary()
    numbers["real_steps"]["train"] = 120
    numbers["real_seconds"] = {"collect": 61.26, "train": 1040.0}
    numbers["real_cost"] = {"train": 2.4}
    numbers["real_failures"] = {
        "collect": {"crashes": 0, "timeouts": 0, "garbage": 0},
        "train": {"crashes": 5, "timeouts": 1200, "garbage": 0},
    }
    numbers["overlap"] = {"dream_seconds": 90.2, "real_seconds": 40.0, "both_seconds": 9.5}
    folder = write_run(tmp_path / "run", numbers, rollouts())
    write_report(folder)
    text = (folder / "report.md").read_text()
    assert "| source | real steps | seconds of them | cost of them | dreamed turns | wall seconds |" in text
    assert "| collect | 12,400 | 61.3 | – | – | 40 |" in text
    assert "| train | 120 | 1,040.0 | 2.40 | 184,320 | 610 |" in text
    assert "| **spent to learn** | **12,520** | **1,101.3** | **2.40** | **184,320** | **950** |" in text
    assert "| **spent to measure** | **600** | **–** | **–** | **–** | **–** |" in text
    overlap = "real play took 40 s, 9.5 s of it while dreams were dreamed (90 s)."
    broke = "Real environments that broke, and were started anew: train: 5 crashed, 1,200 hung."
    for sentence in (overlap, broke):
        assert sentence in text
        assert sentence in page(folder)
    assert page(folder).count(">cost of them</th>") == 1


def test_runs_without_such_numbers_have_no_columns_for_them(run_folder: Path) -> None:
    text = (run_folder / "report.md").read_text()
    assert "| source | real steps | dreamed turns | wall seconds |" in text
    for word in ("while dreams were dreamed", "that broke", "seconds of them"):
        assert word not in text + page(run_folder)


def test_the_panel_is_named_where_there_is_one(tmp_path: Path) -> None:
    named = {"name": "mapreader", "digest": "0123456789abcdef"}
    for number, panel in enumerate((named, None)):
        folder = write_run(tmp_path / str(number), {**summary(), "panel": panel}, [])
        write_report(folder)
        assert ("panel mapreader (0123456789abcdef)" in page(folder)) == (panel is not None)
        assert ("panel mapreader (0123456789abcdef)" in (folder / "report.md").read_text()) == (panel is not None)


def test_a_fall_is_called_a_fall(tmp_path: Path) -> None:
    numbers = summary()
    numbers["policy"]["before"], numbers["policy"]["after"] = numbers["policy"]["after"], numbers["policy"]["before"]
    numbers["real_steps"]["train"] = 1
    sentences = verdict(build_report(load_run(write_run(tmp_path / "run", numbers, []))))
    assert "with 1 real step: " in sentences[0]
    assert "fell from 0.64" in sentences[2]


# partial and broken runs


def test_a_missing_number_names_the_stage_that_has_not_run(tmp_path: Path) -> None:
    numbers = summary()
    del numbers["policy"]["after"], numbers["real_steps"]["clone"]
    folder = write_run(tmp_path / "run", numbers, rollouts())
    with pytest.raises(ReportError, match=r"(?s)'clone' .* real_steps\.clone.*'evaluate .* policy\.after\.train_tasks"):
        write_report(folder)
    assert not (folder / "report.json").exists()

    write_report(folder, partial=True)
    report = json.loads((folder / "report.json").read_text())
    assert report["partial"]
    assert report["policy"]["after"] == {"train_tasks": None, "heldout_tasks": None, "dream_success": None}
    assert report["optimism_gap"]["after"] is None
    assert any("'clone'" in note for note in report["notes"])
    assert "no evaluation after" in report["verdict"][0]
    assert "not finished" in page(folder)


@pytest.mark.parametrize("partial_summary", [{}, {"seed": 3}, {"policy": {"after": summary()["policy"]["after"]}}])
def test_any_beginning_of_a_run_can_be_reported(tmp_path: Path, partial_summary: Json) -> None:
    folder = write_run(tmp_path / "run", partial_summary, [])
    write_report(folder, partial=True)
    table = terminal_table(json.loads((folder / "report.json").read_text()))
    assert len(table.rows) == 2


def test_an_unmeasurable_number_is_null_with_a_sentence_and_needs_no_permission(tmp_path: Path) -> None:
    numbers = summary()
    numbers["world_model"]["reward_precision"] = float("nan")  # no reward was predicted
    numbers["policy"]["after"]["dream_success"] = None  # a run that never dreams
    report = build_report(load_run(write_run(tmp_path / "run", numbers, [])))
    assert not report["partial"]
    assert report["world_model"]["reward_precision"] is None
    assert [note.split()[0] for note in report["notes"]] == [
        "world_model.reward_precision",
        "policy.after.dream_success",
    ]
    assert "the dream believed" not in verdict(report)[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("real_steps.train", 1.5),
        ("real_steps.train", True),
        ("world_model.exact_match", 91.4),
        ("policy.after.train_tasks", 0.64),
        ("policy.after.train_tasks", {"success": 41, "n": 64, "ci95": [0.5, 0.7]}),
        ("wall_seconds", 950.0),
        ("policy.before", 1),
    ],
)
def test_a_number_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, path: str, value: object) -> None:
    numbers = summary()
    *parents, key = path.split(".")
    holder = numbers
    for parent in parents:
        holder = holder[parent]
    holder[key] = value
    with pytest.raises(ReportError, match=re.escape(path)):
        build_report(load_run(write_run(tmp_path / "run", numbers, [])))


def test_a_torn_last_line_is_skipped_and_a_torn_line_before_it_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary(), [])
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"stage": "train", "step": 0}\n{"stage": "tr')
    assert len(load_run(folder).metrics) == 1
    metrics.write_text('{"stage": "tr\n{"stage": "train", "step": 0}\n')
    with pytest.raises(ReportError, match="line 1"):
        load_run(folder)
    with pytest.raises(ReportError, match="no run folder"):
        load_run(tmp_path / "nowhere")


# report.html


def test_the_page_needs_nothing_but_itself(run_folder: Path) -> None:
    text = page(run_folder)
    parsed = Page(text)
    assert all(address.startswith("#") for address in parsed.addresses)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert parsed.tags.count("svg") >= 6
    assert "prefers-color-scheme: dark" in text


def test_the_pages_of_other_stages_are_linked_where_they_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary(), rollouts())
    linked = []
    for name in ("audit.html", "compare.html"):
        (folder / name).write_text("")
        linked.append(name)
        write_report(folder)
        assert [address for address in Page(page(folder)).addresses if not address.startswith("#")] == linked


def test_pictures_take_their_colours_from_the_page(run_folder: Path) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page(run_folder), flags=re.DOTALL)
    assert not re.search(r"#0[1-7]0[1-7]0[1-7]", "".join(svgs))  # a placeholder left over is a near-black line
    assert any("var(--dream)" in svg for svg in svgs)


def test_text_of_games_and_models_is_shown_and_never_run(run_folder: Path) -> None:
    assert EVIL in "".join(Page(page(run_folder)).text)
    assert "<b>" not in (run_folder / "report.html").read_text().split("config.yaml")[1].split("</pre>")[0]


def test_every_field_that_a_model_or_a_game_can_write_is_escaped(tmp_path: Path) -> None:
    dreamed, played = turn(EVIL, action=EVIL), turn("no", action=EVIL)
    dreamed["info"]["reasoning"] = EVIL
    rows = [
        row("d0", "dream", "after", [dreamed], task_id=EVIL, start=EVIL),
        row("r0", "real", "replay", [played], task_id=EVIL, start=EVIL, twin_of="d0"),
        row("e0", "real", "after", [dreamed], task_id=EVIL, start=EVIL * 20),
    ]
    numbers = {**summary(), "hardware": EVIL, "versions": {EVIL: EVIL}}
    numbers["wall_seconds"][EVIL] = 3.0
    folder = write_run(tmp_path / "run", numbers, rows)
    write_report(folder)
    assert not {"script", "img"} & set(Page(page(folder)).tags)
    outside = re.sub(r"^(`{3,})diff\n.*?^\1$", "", (folder / "report.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside


def test_the_first_difference_is_marked_at_its_turn_and_only_there(run_folder: Path) -> None:
    turns = re.findall(r'<li class="turn (\w+)" data-turn="(\d+)">(.*?)</li>', page(run_folder), flags=re.DOTALL)
    assert [(state, number) for state, number, _ in turns] == [("agree", "1"), ("first", "2"), ("after", "3")]
    assert "Turn 2: here they part" in turns[1][2]
    assert "<mark>red</mark>" in turns[1][2]
    assert "<mark>blue</mark>" in turns[1][2]
    assert "<mark>" not in turns[0][2]
    assert "here they part" not in turns[0][2] + turns[2][2]
    assert "confidence 83 %" in turns[0][2]


# report.md and the terminal


def test_markdown_and_terminal_show_the_same_numbers(run_folder: Path) -> None:
    report = json.loads((run_folder / "report.json").read_text())
    console = Console(width=80, record=True, file=(run_folder / "console.txt").open("w"))
    console.print(terminal_table(report))
    printed = console.export_text()
    markdown = (run_folder / "report.md").read_text()
    for number in ("0.31 [0.21, 0.43]", "0.41 [0.29, 0.53]", "0.70 [0.64, 0.75]", "n=256", "+0.06"):
        assert all(part in printed for part in number.split(" ", 1))
        assert number in markdown
    assert max(map(len, printed.splitlines())) <= 80
    assert "-   A red lamp.\n+   A blue lamp." in markdown


def test_an_observation_cannot_leave_its_fence(tmp_path: Path) -> None:
    rows = [
        row("d0", "dream", "after", [turn("``````\n# gotcha")]),
        row("r0", "real", "replay", [turn("no")], twin_of="d0"),
    ]
    folder = write_run(tmp_path / "run", summary(), rows)
    write_report(folder)
    assert re.search(r"^`{9,}diff$", (folder / "report.md").read_text(), flags=re.MULTILINE)


# twins


def test_what_counts_as_a_difference() -> None:
    hall = Turn("go east", "A hall.", 0.0, False)

    def first(dream: list[Turn], real: list[Turn]) -> tuple[int, TurnClass] | None:
        alignment = align_turns(dream, real)
        return None if alignment.first is None else (alignment.first, alignment.turns[alignment.first].kind)

    assert first([hall], [replace(hall, observation="A   hall.\n")]) is None  # white space
    assert first([hall], [replace(hall, reward=None)]) is None  # nobody measured it
    assert first([hall], [hall, replace(hall, observation="More.")]) is None  # the dream was cut, not wrong
    assert first([hall, hall], [hall, replace(hall, reward=1.0)]) == (1, TurnClass.REWARD)
    assert first([replace(hall, terminated=True)], [hall, hall]) == (0, TurnClass.END)


def test_a_replay_that_crashed_is_no_twin() -> None:
    rows = rollouts()
    rows[1]["stop"] = "env_crashed"
    assert replayed_pairs(rows) == []


def test_a_reward_that_the_guard_withheld_is_no_difference() -> None:
    won, withheld = turn("You win.", 1.0, True), turn("You win.", 0.0)
    rows = [row("d0", "dream", "after", [turn("A hall."), withheld], stop="unsure")]
    rows.append(row("r0", "real", "replay", [turn("A hall."), won], twin_of="d0"))
    (pair,) = replayed_pairs(rows)
    assert pair.alignment.first is None
    assert still_true([pair]) == [(0, 1.0, 1), (1, 1.0, 1), (2, 1.0, 1)]


def test_dreams_that_end_true_leave_the_count_of_the_curve() -> None:
    hall, cave = turn("A hall."), turn("A cave.")
    lives = [([hall], [hall]), ([hall, hall], [hall, cave]), ([hall] * 3, [hall] * 3), ([hall], [cave])]
    rows = []
    for i, (dreamed, played) in enumerate(lives):
        rows += [row(f"d{i}", "dream", "after", dreamed), row(f"r{i}", "real", "replay", played, twin_of=f"d{i}")]
    # turn 1: 1 of 4 parts -> 3/4; turn 2: of the 2 that go on 1 parts -> 3/8; turn 3: 1 goes on and stays true
    assert still_true(replayed_pairs(rows)) == [(0, 1.0, 4), (1, 0.75, 4), (2, 0.375, 2), (3, 0.375, 1)]


def test_turns_copied_from_a_log_do_not_lengthen_a_dream() -> None:
    hall, cave = turn("A hall."), turn("A cave.")
    rows = [
        row("d0", "dream", "after", [hall, hall, hall], prefix_turns=2),
        row("r0", "real", "replay", [hall, hall, cave], twin_of="d0"),
    ]
    assert still_true(replayed_pairs(rows)) == [(0, 1.0, 1), (1, 0.0, 1)]


@pytest.mark.parametrize(
    ("a", "b"), [("a red lamp", "a blue lamp"), ("", "x"), ("one\n\ntwo  three", "one two three"), ("q", "")]
)
def test_the_pieces_of_a_diff_are_the_text(a: str, b: str) -> None:
    left, right = word_diff(a, b)
    assert "".join(text for text, _ in left) == a
    assert "".join(text for text, _ in right) == b


# curves


def test_series_leave_out_what_was_not_measured_and_bins_keep_the_mean() -> None:
    rows = [{"stage": "train", "step": s, "kl": v} for s, v in ((2, 3.0), (0, 1.0), (1, float("nan")), (3, None))]
    assert series(rows, "train", "kl") == [(0.0, 1.0), (2.0, 3.0)]
    points = [(float(i), float(i)) for i in range(1000)]
    assert len(binned(points, 240)) == 240
    assert binned(points, 10)[0] == (49.5, 49.5)
    assert trend(points)[0] == (0.0, 2.0)  # the mean of 0 to 4
    assert trend(points)[500] == (500.0, 500.0)


# tripwires and calibration

STOP = {
    "wire": "unseen", "update": 7, "sentence": "the dream pays for nothing", "example": f"take {EVIL}",
    "policy_of_update": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wires", "said"),
    [
        ({"enabled": True, "updates": 8, "blind": [], "stopped_by": STOP}, "that played update 6"),
        (
            {"enabled": True, "updates": 1, "blind": [], "stopped_by": {**STOP, "policy_of_update": None}},
            "policy it started with",
        ),
        (
            {"enabled": True, "updates": 8, "blind": [], "stopped_by": {**STOP, "since": 6, "after_training": False}},
            "counts since update 6, ",
        ),
        (
            {"enabled": True, "updates": 7, "blind": [], "stopped_by": {**STOP, "since": 6, "after_training": True}},
            "was taken back",
        ),
        ({"enabled": False, "updates": 0, "blind": [], "stopped_by": None}, "tripwires.enabled=false"),
        ({"enabled": True, "updates": 24, "blind": ["unseen", "short"], "stopped_by": None}, "unseen, short"),
    ],
)
def test_every_page_says_what_became_of_the_tripwires(tmp_path: Path, wires: Json, said: str) -> None:
    folder = write_run(tmp_path / "run", {**summary(), "tripwires": wires}, rollouts())
    write_report(folder)
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text()
        assert said in text, name
        assert EVIL not in text, name
    assert json.loads((folder / "report.json").read_text())["tripwires"] == wires


def test_quiet_tripwires_and_old_runs_are_not_worth_a_sentence(tmp_path: Path) -> None:
    quiet = {"tripwires": {"enabled": True, "updates": 24, "blind": [], "stopped_by": None}}
    for number, more in enumerate(({}, quiet)):
        folder = write_run(tmp_path / str(number), {**summary(), **more}, rollouts())
        write_report(folder)
        assert "ripwire" not in (folder / "report.md").read_text() + page(folder)


def test_calibration_before_and_after(tmp_path: Path) -> None:
    numbers = summary()
    numbers["world_model"]["calibration"] = {
        "ece_before": 0.123, "ece_after": 0.045, "outcome_ece_before": 0.067, "outcome_ece_after": 0.008,
        "right": 0.875, "n": 1380,
    }  # fmt: skip
    folder = write_run(tmp_path / "run", numbers, rollouts())
    write_report(folder)
    for text in ((folder / "report.md").read_text(), page(folder)):
        for number in ("0.123", "0.045", "0.067", "0.008", "1,380"):
            assert number in text


def test_a_thought_is_shown_with_the_dreamed_turn_and_not_with_a_logged_one(tmp_path: Path) -> None:
    turns = [turn("A hall."), turn("A cat.")]
    for number, one in enumerate(turns):
        one["info"] = {"reasoning": f"Zounds {number}"}
    rows = [
        row("d0", "dream", "after", turns, prefix_turns=1),
        row("r0", "real", "replay", [turn("A hall."), turn("A cat.")], twin_of="d0"),
    ]
    write_report(write_run(tmp_path / "run", summary(), rows))
    shown = page(tmp_path / "run")
    assert "thought before it</summary>Zounds 1<" in shown
    assert "Zounds 0" not in shown


def test_what_rules_answered_is_counted_by_rule(tmp_path: Path) -> None:
    """Logged turns that a dream began with were answered by nobody; without rules nothing is said of them."""

    def dream(name: str, infos: list[Json], prefix: int = 0) -> Json:
        turns = [{"action": "go", "observation": "x", "reward": 0, "terminated": False, "info": i} for i in infos]
        return {
            "id": name, "stage": "train", "which": "update", "step": 0, "source": "dream", "split": "train",
            "task_id": "t", "group_id": "g", "start": "s", "turns": turns, "stop": "turn_limit", "solved": False,
            "prefix_turns": prefix,
        }  # fmt: skip

    rule, other = {"rule": 'go: if "<b>" -> again'}, {"rule": "go -> no"}
    rows = [dream("a", [rule, rule, {"mended": True}]), dream("b", [{}, other, {"broken": "x"}], prefix=1)]
    run = load_run(write_run(tmp_path / "run", summary(), rows))
    found = build_report(run)["answered_by_rule"]
    assert found == {
        "turns": 5,
        "answered": 3,
        "mended": 1,
        "inconsistent": 1,
        "by_rule": [[rule["rule"], 2], ["go -> no", 1]],
    }
    write_report(tmp_path / "run")
    shown = page(tmp_path / "run")
    assert "answered 60.0%" in shown
    assert rule["rule"] not in shown
    assert rule["rule"] in unescape(shown)
    assert "answered_by_rule" not in build_report(
        load_run(write_run(tmp_path / "other", summary(), [dream("a", [{}])]))
    )
