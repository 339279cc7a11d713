"""Questions of several hops, answered with a search engine over a local corpus.

So search agents are trained without a live search API: in dreams a model plays the engine, as in ZeroSearch (arXiv
2505.04588), and the real one is local. The corpus is generated (``search_corpus.py``), or a folder of .txt and .md
files with a JSONL of questions.

``search: <words>`` lists titles with a sentence of each article (by BM25, dense vectors, or both), ``open: <title>``
shows a listed article, and ``answer: <text>`` ends the episode and earns 1 where it is an answer, as SQuAD compares
them. A search too many ends the episode, too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.env import StepResult, Task
from real_envs.errors import UserError
from real_envs.panels import digest
from real_envs.retrieval import Bm25, LatentSemantics, WordNumbers, fused, words_of
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from real_envs.worlds.generated import Game, GeneratedWorld, TaskRequest, draw_distinct, hints
from real_envs.worlds.search_corpus import FOLDS, MOST_ENTITIES, Article, Hop, Question, ask, make_corpus, normalise

INVALID = r"Unknown action|No result has that title"
_ACTION = re.compile(r"(search|open|answer): ?(\S.*)")
_TITLE_COUNTS = 3  # times a word of the text
_FUSED = 100  # articles of each ranking that are fused
_TRIES = 30  # questions drawn for each task
_COMPOSED_TRIES = 300  # for each that is composed of what a log found
LANGUAGE = CommandGrammar.of(
    "5 search: {a} | 3 search: {a} {b} | 4 open: {a} | 1 answer: {a} | 0.5 answer: unknown | 0.5 search {a} | "
    "0.5 look up {a} | 0.5 open {a} | 0.3 {a}",
    directions=(),
    look="search: article",
)


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The corpus, the questions and the engine."""

    entities: int = 2000  #: people, places, organisations and works of the generated corpus; articles are a fifth more
    corpus_seed: int = 0  #: of the generated corpus, which is the same for all seeds of a run
    min_hops: int = 1  #: of a generated question, at least
    max_hops: int = 3  #: of a generated question, at most
    #: what ranks articles: words, latent semantic analysis of the corpus, or the fusion of both rankings
    retrieval: Literal["bm25", "dense", "both"] = "bm25"
    dense_rank: int = 256  #: dimensions of the latent space
    k: int = 3  #: articles that a search lists
    snippet_words: int = 12  #: of the sentence of a listed article that has most words of the query
    max_queries: int = 8  #: searches of an episode; one more ends it
    corpus: str = ""  #: a folder of .txt and .md files; empty generates one
    questions: str = ""  #: JSON lines for it: question, answers, and fold where the answer should not choose it
    article_words: int = 80  #: longer texts of such files are cut into articles of so many words
    heldout_fold: Literal["dev", "test"] = (
        "test"  #: the fold of held-out tasks: ``dev`` to choose by, ``test`` to report
    )

    def __post_init__(self) -> None:
        if not 100 <= self.entities <= MOST_ENTITIES:
            raise ValueError(f"entities is 100 to {MOST_ENTITIES}, got {self.entities}")
        if not 1 <= self.min_hops <= self.max_hops <= min(4, self.max_queries):
            raise ValueError("hops want 1 <= min_hops <= max_hops <= 4, and max_queries is max_hops or more")
        if min(self.k, self.snippet_words, self.article_words, self.dense_rank) < 1:
            raise ValueError("k, snippet_words, article_words and dense_rank are 1 or more")
        if bool(self.corpus) != bool(self.questions):
            raise ValueError("corpus and questions belong together: set both, or none")


class SearchEngine:
    """Articles and their rankings, see ``SearchSettings.retrieval``."""

    def __init__(self, articles: list[Article], settings: SearchSettings) -> None:
        self.texts = {article.title: article.text for article in articles}
        self._titles = list(self.texts)
        numbers = WordNumbers()
        words = [words_of(title) * _TITLE_COUNTS + words_of(text) for title, text in self.texts.items()]
        documents = [numbers.of(document) for document in words]
        self._indexes: list[Bm25 | LatentSemantics] = []
        if settings.retrieval != "dense":
            self._indexes.append(Bm25(documents, numbers))
        if settings.retrieval != "bm25":
            self._indexes.append(LatentSemantics(documents, numbers, settings.dense_rank))

    def search(self, query: str, k: int, snippet_words: int) -> list[Article]:
        """The best ``k`` articles, the text of each cut to the sentence that has most words of the query."""
        words = set(words_of(query))
        first, *more = self._indexes
        if more:
            best = fused([index.best(sorted(words), max(k, _FUSED)) for index in self._indexes], k)
        else:
            best = first.best(sorted(words), k)
        listed = [self._titles[at] for at in best]
        return [Article(title, self._snippet(title, words, snippet_words)) for title in listed]

    def _snippet(self, title: str, words: set[str], most: int) -> str:
        sentences = re.split(r"(?<=[.!?]) ", self.texts[title])
        shown = max(sentences, key=lambda sentence: len(words & set(words_of(sentence)))).split()
        return " ".join(shown[:most]) + (" ..." if len(shown) > most else "")


@lru_cache(2)
def engine_of(settings: SearchSettings) -> SearchEngine:
    """Raises ``UserError``: the folder of the corpus cannot be read, or holds no text."""
    if not settings.corpus:
        return SearchEngine(make_corpus(settings.entities, settings.corpus_seed).articles, settings)
    articles = list(read_articles(Path(settings.corpus).expanduser(), settings.article_words))
    if not articles:
        raise UserError(f"env.options.corpus={settings.corpus} holds no .txt or .md file with text")
    return SearchEngine(articles, settings)


def read_articles(folder: Path, most: int) -> Iterator[Article]:
    """The files below the folder, in parts of at most so many words: ``rivers/nile``, ``rivers/nile (2)``."""
    titles = set[str]()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md")):
        try:
            words = path.read_text(encoding="utf-8-sig").split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
        name = " ".join(path.relative_to(folder).with_suffix("").as_posix().split())  # as actions are read
        parts = range(0, len(words), most)
        own = [name, *(f"{name} ({part})" for part in range(2, len(parts) + 1))]
        if both := titles.intersection(own):
            raise UserError(f"{path}: another file has an article {min(both)!r}, too, and names are titles")
        titles.update(own)
        for title, at in zip(own, parts, strict=False):  # an empty file has no part
            yield Article(title, " ".join(words[at : at + most]))


def read_questions(path: Path) -> list[tuple[str, Question]]:
    """Folds and questions of a file of JSON lines, without hops. Raises ``UserError``: what is wrong in which line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"env.options.questions={path}: cannot be read: {error}") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"is no JSON object: {line:.60}")
            text, answers = record.get("question"), record.get("answers")
            answers = [answers] if isinstance(answers, str) else answers
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"field question is {text!r:.60}, not text")
            if not isinstance(answers, list) or not answers or not all(map(_is_answer, answers)):
                raise ValueError(f"field answers is {record.get('answers')!r:.60}, not a text or a list of texts")
            fold = record.get("fold") or FOLDS[derive_seed(f"search fold/{normalise(answers[0])}") % len(FOLDS)]
            if fold not in FOLDS:
                raise ValueError(f"field fold is {fold!r:.60}, not train, dev or test")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        questions.append((fold, Question(" ".join(text.split()), tuple(answers))))
    return questions


def _is_answer(value: object) -> bool:
    return isinstance(value, str) and bool(normalise(value))


class SearchGame(Game):
    """The question of a task; ``policy_commands`` are of the next link of its chain: no script answers what it has not
    read."""

    def __init__(self, settings: SearchSettings, privileged: bool = False) -> None:
        super().__init__(privileged)
        self._settings = settings

    def _start(self, task: Task) -> str:
        self._engine = engine_of(self._settings)
        self._question = question_of(task.privileged)
        self._queries = self._settings.max_queries
        self._shown: dict[str, str] = {}  # by title of a listed article: what was shown of it
        return start_of(self._settings, self._question)

    def _act(self, action: str) -> StepResult:
        match = _ACTION.fullmatch(" ".join(action.split()))
        if match is None:
            return self._said("Unknown action: use search:, open: or answer:.")
        kind, rest = match[1], match[2]
        if kind == "answer":
            right = normalise(rest) in map(normalise, self._question.answers)
            return self._said("Right." if right else "Wrong.", float(right), True)
        if kind == "open":
            title = next((title for title in self._shown if title.lower() == rest.lower()), None)
            if title is None:
                return self._said("No result has that title.")
            self._shown[title] = self._engine.texts[title]
            return self._said(as_shown(title, self._engine.texts[title]))
        if not self._queries:
            return self._said("No searches are left.", 0.0, True)
        self._queries -= 1
        results = self._engine.search(rest, self._settings.k, self._settings.snippet_words)
        for title, text in results:
            self._shown[title] = f"{self._shown.get(title, '')} {text}"
        lines = [f"{place}. {as_shown(*result)}" for place, result in enumerate(results, start=1)]
        return self._said("\n".join(lines) or "No results.")

    def _said(self, text: str, reward: float = 0.0, ended: bool = False) -> StepResult:
        return StepResult(self._observation(text), reward, ended, False)

    def _hints(self) -> dict[str, object]:
        names, plan = [self._question.hops[0].query if self._question.hops else self._question.text], list[str]()
        for query, title, shown in self._question.hops:
            if shown not in self._shown.get(title, ""):
                plan = [] if title in self._shown else [f"search: {query}"]
                plan.append(f"open: {title}")
                break
            names.append(shown)
            plan = [f"answer: {shown}"]
        names = list(dict.fromkeys([*names, *list(self._shown)[-self._settings.k :]]))
        commands = [f"search: {name}" for name in names] + [f"open: {title}" for title in self._shown]
        return hints([*commands, f"answer: {names[-1]}"], plan, entities=names)


def start_of(settings: SearchSettings, question: Question) -> str:
    """The first observation."""
    actions = "Actions: search: <words>, open: <title>, answer: <text>."
    return f"Question: {question.text}\n{actions} Searches: {settings.max_queries}."


def as_shown(title: str, text: str) -> str:
    return f"{title}: {text}"


def question_of(drawn: Mapping[str, Any]) -> Question:
    return Question(drawn["question"], tuple(drawn["answers"]), tuple(Hop(*hop) for hop in drawn["hops"]))


class Search(GeneratedWorld):
    """``env=search`` (a ``World``)."""

    name: ClassVar[str] = "search"
    settings: ClassVar[type[SearchSettings]] = SearchSettings
    package: ClassVar[str] = "imagination"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    elsewhere: ClassVar[bool] = False

    def draw(self, settings: SearchSettings, request: TaskRequest) -> dict[str, list[dict[str, Any]]]:
        engine = engine_of(settings)

        def answers_hop(hop: Hop) -> bool:
            return hop.title in [article.title for article in engine.search(hop.query, settings.k, 1)]

        def candidates(split: str, count: int) -> Iterator[Question]:
            fold = settings.heldout_fold if split == "heldout" else split
            rng = random.Random(derive_seed(f"search/{split}", request.seed))
            if settings.corpus:
                own = [q for f, q in read_questions(Path(settings.questions).expanduser()) if f == fold]
                yield from (with_hop(engine, question, answers_hop) for question in rng.sample(own, len(own)))
                return
            corpus = make_corpus(settings.entities, settings.corpus_seed)
            holds = corpus.holds()
            for _ in range(_TRIES * count):
                question = ask(corpus, holds, fold, rng.randint(settings.min_hops, settings.max_hops), rng)
                if question is not None and all(map(answers_hop, question.hops)):
                    yield question

        def too_few(split: str, number: int) -> str:
            return f"there are {number} questions for games.{split}={request.counts[split]}"

        drawn = draw_distinct(request, candidates, partial(start_of, settings), too_few)
        return {split: [_drawn(question, engine) for question in questions] for split, questions in drawn.items()}

    def compose(self, settings: SearchSettings, log: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
        """See ``World``: training questions of what the log's searches found, after Search Self-play (arXiv
        2510.18821). There a policy writes questions of pages that it found, and those stay that these pages answer.
        Here facts of such pages are composed as in ``draw``; the corpus says what the one answer is; and the log's own
        searches and pages must lead to it, by the names in the question and on the pages.
        """
        if settings.corpus:
            raise UserError(
                "questions are composed of a generated corpus alone, and env.options.corpus is one of your own: set "
                "clone.supplements=[] and dream.hindsight=0"
            )
        corpus, engine = make_corpus(settings.entities, settings.corpus_seed), engine_of(settings)
        holds, turns_by_action = corpus.holds(), _finding_turns(log)
        rng = random.Random(derive_seed("search/composed", seed))
        starts, episodes = {episode.start for episode in log}, list[Trajectory]()
        for _ in range(_COMPOSED_TRIES * count):
            question = ask(corpus, holds, "train", rng.randint(settings.min_hops, settings.max_hops), rng)
            if question is None or len(episodes) == count or (start := start_of(settings, question)) in starts:
                continue
            steps = [_logged(hop, turns_by_action) for hop in question.hops]
            if all(steps):
                starts.add(start)
                answer = Turn(f"answer: {question.hops[-1].shown}", "Right.", 1.0, True)
                name, turns = f"search-{digest(question.text)}", [turn for some in steps for turn in some]
                episodes.append(
                    Trajectory(
                        *(f"composed/{name}", name, f"composed/{name}", Source.EXPERT, "composed", seed, start),
                        turns=(*turns, answer),
                        stop=StopReason.TERMINATED,
                        world_facts=tuple(_drawn(question, engine)["facts"]),
                    )
                )
        return episodes

    def task(self, drawn: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
        hidden = {key: drawn[key] for key in ("question", "answers", "hops")}
        return Task(f"search-{digest(drawn['question'])}", privileged=hidden, world_facts=tuple(drawn["facts"]))

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[SearchGame]:
        return partial(SearchGame, SearchSettings(**settings), privileged)


def _finding_turns(log: Sequence[Trajectory]) -> dict[str, Turn]:
    """The turns that listed or showed something, by action in lower case; the answer is the same in all episodes."""
    turns = (turn for episode in log for turn in episode.turns if _ACTION.fullmatch(turn.action))
    return {t.action.lower(): t for t in turns if re.match(r"1\. |(?!No )[^:]+: ", t.observation) and not t.terminated}


def _logged(hop: Hop, turns_by_action: Mapping[str, Turn]) -> list[Turn]:
    """The logged turns that find what the hop shows: a search, and the page where the list does not show it; none where
    the log has none."""
    search, page = map(turns_by_action.get, (f"search: {hop.query}".lower(), f"open: {hop.title}".lower()))
    listed = re.search(rf"^\d+\. {re.escape(hop.title)}: (.*)", search.observation, re.MULTILINE) if search else None
    if search is None or listed is None:
        return []
    turns = [search] if hop.shown in listed[1] else [search, page] if page and hop.shown in page.observation else []
    return [replace(turn, reward=0.0, info={}) for turn in turns]


def with_hop(engine: SearchEngine, question: Question, answers_hop: Callable[[Hop], bool]) -> Question:
    """The question, with the first article that holds an answer and that its title finds, where there is one."""
    for answer in question.answers:
        for title, text in engine.texts.items():
            if answer in text and answers_hop(hop := Hop(title, title, answer)):
                return question._replace(hops=(hop,))
    return question


def _drawn(question: Question, engine: SearchEngine) -> dict[str, Any]:
    """With the articles of the chain as facts, in no order that would tell the answer."""
    titles = sorted({hop.title for hop in question.hops})
    facts = [as_shown(title, engine.texts[title]) for title in titles]
    return {"question": question.text, "answers": question.answers, "hops": question.hops, "facts": facts}
