"""Questions over a corpus. If these fail, right answers are called wrong, or a model was trained on what judges it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from real_envs.env import Task
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from real_envs.worlds.search import Search, SearchGame, SearchSettings, engine_of, read_articles
from real_envs.worlds.search_corpus import FOLDS, RELATIONS, Corpus, Fact, Question, ask, make_corpus, normalise
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused

SMALL = SearchSettings(entities=300)


def questions(count: int = 200) -> list[tuple[str, Question]]:
    corpus, rng = make_corpus(300, 0), random.Random(0)
    drawn = [
        (fold, ask(corpus, corpus.holds(), fold, rng.randint(1, 3), rng)) for fold in FOLDS * (count // len(FOLDS))
    ]
    return [(fold, question) for fold, question in drawn if question]


def test_the_same_seed_makes_the_same_corpus() -> None:
    corpus = make_corpus(300, 5)
    make_corpus.cache_clear()
    again = make_corpus(300, 5)
    assert again is not corpus
    assert again == corpus
    assert make_corpus(300, 6).articles != corpus.articles
    sizes = [len(article.text.split()) for article in corpus.articles]
    assert 30 <= min(sizes) <= max(sizes) <= 80
    names = [normalise(name) for own in corpus.names.values() for name in own]
    assert len(names) == len(set(names))
    assert len({article.title for article in corpus.articles}) == len(corpus.articles)


def derived(text: str, corpus: Corpus) -> set[str]:
    """What a question ends in where phrases are replaced by what the newest fact says, in whatever order."""
    newest: dict[tuple[str, str], Fact] = {}
    for fact in corpus.facts:
        key = (fact.subject, fact.relation)
        if key not in newest or newest[key].year < fact.year:
            newest[key] = fact
    known = [
        (phrase.format(name), fact.value)
        for (place, key), fact in newest.items()
        for phrase in RELATIONS[corpus.kinds[place]][key].phrases
        for name in corpus.names[place]
    ]
    left, ends = {text}, set()
    while left:
        now = left.pop()
        steps = {re.sub(rf"{re.escape(said)}(?=\?| [a-z])", value, now) for said, value in known if said in now} - {now}
        left |= steps
        ends |= {now} - ({now} if steps else set())
    return ends


def test_an_answer_follows_from_the_facts_and_the_newer_one_holds() -> None:
    corpus, hops, outdated = make_corpus(300, 0), Counter[int](), 0
    for _, question in questions():
        (end,) = derived(question.text, corpus)
        answer = end.removesuffix("?").partition(" is ")[2]
        assert question.answers == (corpus.names.get(answer) or question.answers)
        assert answer == question.answers[0]
        assert not any(normalise(name) in normalise(question.text) for name in question.answers)
        old = Corpus([], [fact for fact in corpus.facts if fact.year < 2000], corpus.names, corpus.kinds)
        outdated += derived(question.text, old) not in ({question.text}, {end})
        hops[len(question.hops)] += 1
        articles = dict(corpus.articles)
        assert all(hop.shown in articles[hop.title] for hop in question.hops)
    assert outdated > 5  # older articles would have led elsewhere
    assert min(hops[1], hops[2], hops[3]) > 20


def test_no_answer_and_no_link_is_in_two_folds() -> None:
    corpus = make_corpus(300, 0)
    names = {own: name for name, all_names in corpus.names.items() for own in all_names}
    seen: dict[str, set[str]] = {fold: set() for fold in FOLDS}
    for fold, question in questions(1000):
        links = {names.get(link, link) for hop in question.hops for link in (hop.query, hop.shown)}
        seen[fold] |= links | {normalise(answer) for answer in question.answers}
    assert all(len(links) > 20 for links in seen.values())
    assert not seen["train"] & seen["dev"] | seen["train"] & seen["test"] | seen["dev"] & seen["test"]


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("The  Red-Light!", "redlight", True),
        ("a Theatre of the An", "theatre of", True),
        ("March 8, 1841", "march 8 1841", True),
        ("Ada B. Lake", "ada b lake", True),
        ("Banana", "ban", False),
        ("8 March 1841", "March 8, 1841", False),
        ("Oldford", "Old ford", False),
    ],
)
def test_answers_are_compared_as_in_squad(text: str, other: str, same: bool) -> None:
    assert (normalise(text) == normalise(other)) is same


@pytest.mark.parametrize("retrieval", ["bm25", "dense", "both"])
def test_the_expert_solves_each_question_and_the_protocol_holds(retrieval: Any, tmp_path: Path) -> None:
    settings = SearchSettings(entities=300, retrieval=retrieval)
    tasks = generated(Search(), tmp_path, {"train": 30, "heldout": 20}, settings)
    game, drawn = SearchGame(settings, privileged=True), [*tasks.tasks("train"), *tasks.tasks("heldout")]
    assert len({task.id for task in drawn}) == 50
    for task in drawn:
        results = by_plan(game, game.reset(task))
        assert [r.reward for r in results] == [0.0] * (len(results) - 1) + [1.0]
        assert len(results) <= 2 * len(task.privileged["hops"]) + 1  # type: ignore[arg-type]
    assert findings(tasks, ["search: lake", "open: nothing", "what?", "answer: nobody"]) == []


def test_rankings_differ_and_their_fusion_has_both() -> None:
    queries = [
        "a quiet lake",
        "the head of a small country",
        "who walks by the sea",
        "a novel by Simon",
        "founded in May",
    ]
    listed = {
        r: [[a.title for a in engine_of(SearchSettings(entities=300, retrieval=r)).search(q, 5, 9)] for q in queries]
        for r in ("bm25", "dense", "both")
    }
    assert listed["bm25"] != listed["dense"] != listed["both"] != listed["bm25"]
    for words, dense, both in zip(listed["bm25"], listed["dense"], listed["both"], strict=True):
        assert len(set(both)) == 5
        assert set(both) & set(words)
        assert set(both) & set(dense)


def test_tasks_from_before_there_was_a_choice_open_as_they_were(tmp_path: Path) -> None:
    before = generated(Search(), tmp_path, {"train": 3}, SMALL).tasks("train")
    data = json.loads((tmp_path / "games.json").read_text())
    for key in ("retrieval", "dense_rank"):
        del data["made_by"]["settings"][key]
    (tmp_path / "games.json").write_text(json.dumps(data))
    assert Search().open(tmp_path, True, 1).tasks("train") == before


# --- questions of what a log found ---


def logged(settings: SearchSettings, folder: Path, count: int = 60) -> list[Trajectory]:
    """Episodes of the expert that stop before they answer."""
    tasks = generated(Search(), folder, {"train": count}, settings).tasks("train")
    game, log = SearchGame(settings, privileged=True), []
    for task in tasks:
        observation, turns = game.reset(task), list[Turn]()
        start = observation.text
        while not (action := observation.privileged["policy_commands"][0]).startswith("answer"):  # type: ignore[index]
            observation = game.step(action).observation
            turns.append(Turn(action, observation.text, 0.0, False))
        names = (f"real/{task.id}", task.id, task.id)
        log.append(Trajectory(*names, Source.REAL, "policy", 0, start, tuple(turns), StopReason.TURN_LIMIT))
    return log


def test_new_questions_are_of_what_the_log_found_and_the_real_game_pays_for_their_answers(tmp_path: Path) -> None:
    settings = replace(SMALL, min_hops=2)
    log = logged(settings, tmp_path)
    found = [turn for episode in log for turn in episode.turns]
    new = Search().compose(settings, log, 15, seed=3)
    assert new == Search().compose(settings, log, 15, seed=3)
    assert len(new) == 15
    assert not {t.start for t in new} & {t.start for t in log}
    assert len({t.start for t in new}) == len({t.id for t in new}) == 15
    corpus = make_corpus(300, 0)
    game = SearchGame(settings)
    for episode in new:
        assert all(turn in found for turn in episode.turns[:-1])
        assert episode.solved
        text = episode.start.split("\n")[0].removeprefix("Question: ")
        (end,) = derived(text, corpus)  # by the corpus alone, and it is the only one
        answer = end.removesuffix("?").partition(" is ")[2]
        answers = corpus.names.get(answer, (answer,))
        assert episode.turns[-1].action.removeprefix("answer: ") in answers
        assert len(episode.world_facts) in (2, 3)
        hidden = {"question": text, "answers": answers, "hops": []}
        assert game.reset(Task("t", privileged=hidden)).text == episode.start
        for turn in episode.turns:  # what the episode says is what the real game says
            result = game.step(turn.action)
            assert (result.observation.text, result.reward, result.terminated) == (
                *(turn.observation, turn.reward, turn.terminated),
            )


def test_nothing_is_composed_of_what_was_not_found(tmp_path: Path) -> None:
    log = logged(SMALL, tmp_path, 5)
    assert Search().compose(SMALL, [replace(t, turns=t.turns[:0]) for t in log], 5, seed=0) == []
    refused(lambda: Search().compose(replace(SMALL, corpus="a", questions="b"), log, 5, seed=0), "env.options.corpus")


def game_of(**settings: int) -> SearchGame:
    game = SearchGame(SearchSettings(entities=300, **settings))
    game.reset(Task("t", privileged={"question": "Who?", "answers": ["The Old Hill", "Hill"], "hops": []}))
    return game


def test_a_search_too_many_ends_the_episode() -> None:
    game = game_of(max_queries=3, k=2)
    for _ in range(3):
        result = game.step("search: lake")
        assert not result.terminated
        assert len(result.observation.text.split("\n")) == 2
    title = result.observation.text.split("\n")[0].removeprefix("1. ").partition(":")[0]
    assert game.step(f"open: {title.upper()}").observation.text == f"{title}: {engine_of(game._settings).texts[title]}"
    last = game.step("search: hill")
    assert (last.terminated, last.reward) == (True, 0.0)
    refused(lambda: game.step("search: hill"), "reset", error=RuntimeError)


def test_what_is_no_action_is_refused_in_a_line_and_costs_no_search() -> None:
    game = game_of(max_queries=3)
    for action in ("", "look", "search:", "open: ", "Search: lake", "answer", "open: Never Listed"):
        result = game.step(action)
        assert not result.terminated
        assert "\n" not in result.observation.text
    for _ in range(3):
        assert not game.step("search: lake").terminated
    assert game.step("answer: old hill.").reward == 1.0


def folder_of(tmp_path: Path, *lines: object) -> SearchSettings:
    (tmp_path / "texts/rivers").mkdir(parents=True)
    (tmp_path / "texts/rivers/nile.md").write_text("# Nile\n\nThe Nile ends in Egypt. " + "It is long. " * 5)
    (tmp_path / "texts/lakes.txt").write_text("Lake Victoria is the source of the White Nile.")
    (tmp_path / "texts/other.csv").write_text("Nile,1")
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "q.jsonl").write_text(text)
    return SearchSettings(corpus=str(tmp_path / "texts"), questions=str(tmp_path / "q.jsonl"), article_words=12)


def test_a_folder_of_texts_is_a_corpus(tmp_path: Path) -> None:
    lines = [
        {"question": "Where does the Nile end?", "answers": "Egypt", "fold": "train"},
        {"question": "What is the source of the White Nile?", "answers": ["Victoria", "Lake Victoria"], "fold": "test"},
        {"question": "Who wrote of it?", "answers": ["Nobody knows"], "fold": "train"},
    ]
    settings = folder_of(tmp_path, *lines[:2], "", lines[2])
    assert set(engine_of(settings).texts) == {"rivers/nile", "rivers/nile (2)", "lakes"}
    world = Search()
    tasks = generated(world, tmp_path / "run", {"train": 2, "heldout": 1}, settings)
    game = SearchGame(settings, privileged=True)
    for task in [*tasks.tasks("train"), *tasks.tasks("heldout")]:
        observation = game.reset(task)
        if task.privileged["hops"]:
            assert by_plan(game, observation)[-1].reward == 1.0
        else:  # no article has the answer, so nobody knows a plan
            assert task.privileged["answers"] == ["Nobody knows"]
            assert observation.privileged["policy_commands"] == []
    refused(lambda: generated(world, tmp_path / "more", {"train": 3}, settings), "games.train=3", "2")


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ('{"question": "Where?', []),
        ("[1]", []),
        ({"answers": "x"}, ["question"]),
        ({"question": "Where?"}, ["answers"]),
        ({"question": "Where?", "answers": []}, ["answers"]),
        ({"question": "Where?", "answers": ["x", 3]}, ["answers"]),
        ({"question": "Where?", "answers": "the"}, ["answers"]),  # nothing is left of it
        ({"question": "Where?", "answers": "x", "fold": "valid"}, ["fold"]),
    ],
)
def test_a_bad_question_is_named(line: object, tokens: list[str], tmp_path: Path) -> None:
    settings = folder_of(tmp_path, {"question": "Why?", "answers": "So"}, "", line)
    refused(lambda: generated(Search(), tmp_path / "run", {"train": 1}, settings), "q.jsonl", "line 3", *tokens)
    assert not (tmp_path / "run/games.json").exists()


def test_what_cannot_be_a_corpus_is_refused(tmp_path: Path) -> None:
    for wrong in ({"entities": 99}, {"min_hops": 4}, {"k": 0}, {"corpus": "x"}, {"max_queries": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SearchSettings(**wrong)  # type: ignore[arg-type]
    (tmp_path / "q.jsonl").write_text("")
    empty = SearchSettings(corpus=str(tmp_path), questions=str(tmp_path / "q.jsonl"))
    (tmp_path / "a.md").write_text(" ")
    refused(lambda: engine_of(empty), str(tmp_path), ".txt")
    (tmp_path / "a.txt").write_text("Some text.")
    refused(lambda: engine_of(empty), "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    refused(lambda: engine_of(empty), "a.txt", "UTF-8")


def test_names_of_files_are_titles_that_can_be_opened_and_are_there_once(tmp_path: Path) -> None:
    settings = folder_of(tmp_path, {"question": "Where is it?", "answers": "Egypt", "fold": "train"})
    (tmp_path / "texts/White  Nile.txt").write_text("It is in Sudan.")
    game = SearchGame(settings)
    game.reset(generated(Search(), tmp_path / "run", {"train": 1}, settings).tasks("train")[0])
    game.step("search: Sudan")
    assert game.step("open: White  Nile").observation.text == "White Nile: It is in Sudan."
    (tmp_path / "texts/rivers/nile (2).txt").write_text("Another text.")
    refused(lambda: list(read_articles(tmp_path / "texts", 12)), "nile", "'rivers/nile (2)'")
