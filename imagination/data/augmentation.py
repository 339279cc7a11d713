"""Episodes made of logged ones: renamed copies, failures with a goal that they reached, experts with reflections.

The latter two lie in ``supplements/<name>/``, a store beside the log: the policy imitates them, and no world model
reads them, as ``read_log`` does not know them.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings.models import HindsightSettings
from policy.lm.tokenizer import word_pieces
from real_envs.seeding import derive_seed
from real_envs.store import TrajectoryStore
from real_envs.trajectory import StopReason, Trajectory, Turn
from worldmodel.objective import unchanging
from worldmodel.rules.refusals import learn_refusals
from worldmodel.rules.templates import blank, fill, find_templates
from worldmodel.world_model import Prediction

HINDSIGHT, REFLECTIONS = "hindsight", "reflections"
MADE_BY = {REFLECTIONS: "reflect", HINDSIGHT: "relabel"}  # supplement -> command

# --- the store of supplements ---


def supplement_folder(run: RunFolder, name: str) -> Path:
    return run.path / "supplements" / name


def write_supplement(run: RunFolder, name: str, episodes: Sequence[Trajectory]) -> Path:
    """Replaces the supplement ``name``; a crash leaves the earlier one, or none."""
    folder = supplement_folder(run, name)
    draft = folder.with_name(f".{name}")
    shutil.rmtree(draft, ignore_errors=True)
    tasks = list(dict.fromkeys(episode.task_id for episode in episodes))
    TrajectoryStore.create(draft, {"train": tasks}, meta={"made_by": MADE_BY[name]}).append(episodes)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def read_supplements(run: RunFolder, names: Sequence[str]) -> list[Trajectory]:
    """The episodes of these supplements; ``UserError`` where one is missing, ``StoreError`` where one is broken."""
    stores = [TrajectoryStore.open(need(supplement_folder(run, name), MADE_BY[name])) for name in names]
    return [episode for store in stores for episode in store.read("train")]


def _supplementary(episode: Trajectory, name: str, turns: Sequence[Turn]) -> Trajectory:
    """The episode with other turns, under other ids. Its trace and facts belong to what really happened."""
    return replace(
        episode,
        id=f"{name}/{episode.id}",
        group_id=f"{name}/{episode.group_id}",
        agent=f"{name}/{episode.agent}",
        turns=tuple(turns),
        trace=None,
        world_facts=(),
    )


# --- hindsight: failures, relabelled with a goal that they reached ---


def failed(episode: Trajectory) -> bool:
    """Whether it is known not to have solved its task; an outage, or an unmeasured success, is not known."""
    known = episode.success is not None or any(turn.reward is not None for turn in episode.turns)
    return known and not episode.solved and not episode.stop.is_failure


def relabelled(episode: Trajectory, settings: HindsightSettings, refusals: str = "") -> Trajectory | None:
    """The episode up to the last goal that it reached for the first time, with that goal in its start (hindsight:
    Andrychowicz et al. 2017, arXiv 1707.01495; for agents that speak: NNetNav, Murty et al. 2024, arXiv 2410.02907).

    Turns that changed nothing (``worldmodel.objective.unchanging``) are left out, so that nobody imitates them. The
    last turn earns 1 and ends the episode, the others earn 0, and it counts as solved. Observations stay as they were.
    No model judges the goals: their patterns are declared (``HindsightSettings.goals``).

    Returns:
        ``None`` where no declared goal was reached within ``settings.max_turns``, or the start has no place for one.

    Example::

        "Eat the bear. -= Hall =- ...", open chest: "You open the chest.", close chest: "You close the chest." with the
        goal ["You open the (\\w+)", "Open the \\1."] is "Open the chest. -= Hall =- ...", open chest
    """
    if not re.search(settings.place, episode.start):
        return None
    changed = [not same for same in unchanging(episode, refusals)]
    reached = set(_goals(episode.start, settings))
    last: tuple[int, str] | None = None
    for k, turn in enumerate(episode.turns):
        new = [goal for goal in _goals(turn.observation, settings) if goal not in reached]
        reached.update(new)
        if new and changed[k] and (not settings.max_turns or sum(changed[: k + 1]) <= settings.max_turns):
            last = k, new[-1]
    if last is None:
        return None
    end, goal = last
    turns = [
        # reasoning about what comes next is the world model's
        replace(t, reward=0.0, terminated=False, info={k: v for k, v in t.info.items() if k != "reasoning"})
        for t, c in zip(episode.turns[: end + 1], changed, strict=False)
        if c
    ]
    turns[-1] = replace(turns[-1], reward=1.0, terminated=True)
    return replace(
        _supplementary(episode, HINDSIGHT, turns),
        start=re.sub(settings.place, lambda _: goal, episode.start, count=1),
        stop=StopReason.TERMINATED,
        prefix_turns=0,
        success=True,
    )


def _goals(text: str, settings: HindsightSettings) -> Iterator[str]:
    """The goals that this text says are reached, in the order of the declarations."""
    for pattern, goal in settings.goals:
        for match in re.finditer(pattern, text):
            yield match.expand(goal)


# --- reflections: outcomes of other actions, then the expert's, before its action ---
#
# Self-reflection of Zhang et al. 2025 (arXiv 2510.08558, section 4.3) with two changes: other actions are tried in the
# world model and not in the world, and a template writes in place of a chat model.


def contrasts(turn: Turn, prediction: Prediction) -> bool:
    """Whether another action's outcome speaks for the logged one: something else happens, and it pays no more."""
    return prediction.observation != turn.observation and prediction.reward <= (turn.reward or 0.0)


def reflection(alternatives: Sequence[tuple[str, str]], turn: Turn, words: int) -> str:
    """The thought before an action: alternatives are other actions with the observations that the world model predicts
    after them, of which the first ``words`` are repeated.

    Example::

        "drop key: The key falls. take lamp: You take the lamp. So take lamp."
    """
    outcomes = [*alternatives, (turn.action, turn.observation)]
    lines = [f"{action}: {' '.join(observation.split()[:words])}" for action, observation in outcomes]
    return "\n".join([*lines, f"So {turn.action}."])


def with_reflections(
    episode: Trajectory, alternatives: Sequence[Sequence[tuple[str, str]]], words: int
) -> Trajectory | None:
    """The episode with a reflection in ``info["reasoning"]`` of each turn that has alternatives; ``None`` where no turn
    has any."""
    if not any(alternatives):
        return None
    turns = [
        replace(turn, info={"reasoning": reflection(others, turn, words)} if others else {})
        for turn, others in zip(episode.turns, alternatives, strict=True)
    ]
    return _supplementary(episode, REFLECTIONS, turns)


# --- renamed copies: things have made-up names, so that a model learns to copy names and not to memorise them ---
#
# A log has a few dozen nouns, and a small model trained on it knows those and no other: where a new task has nylon in
# place of oak it answers nonsense (data recombination: Jia and Liang 2016, arXiv 1606.03622; made-up words for
# copying: Lake and Baroni 2023, "Human-like systematic generalization through a meta-learning neural network").

# a part of dev_notes.txt is a word, and so is what is quoted: 'oak'; the unit of 25kg is none, nor is a part of isn't
_WORD = re.compile(r"(?<![A-Za-z\d])(?<!\w')[A-Za-z]{3,}(?![A-Za-z\d])(?!'\w)")
_LETTERS = re.compile(r"[A-Za-z]+")
_COMMON = 0.6  # of the tasks: words of more tasks are the world's grammar, such as its verbs and directions
_NAMED = 0.1  # of the tasks that have it: words that actions seldom name, such as "nothing", are no things
_OF_PIECES = 0.5  # of the names, where there are pieces
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def with_renamed(
    log: Sequence[Trajectory], copies: int, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Trajectory]:
    """The log, and after it so many copies of it in which things have made-up names; ids and rewards stay.

    With a tokenizer, half of the names are made of what its single tokens write (``word_pieces``): a token that a model
    never has to write is one that it learns not to write, and names of it are copied with a gap ("noodle" as "nle").

    A word is a thing's name if actions name it in a tenth of the tasks that have it, at most six tenths of all tasks
    have it, and in this episode no action says it before the world does. In an episode it is the same throughout.
    """
    if not copies:
        return [*log]
    names, pieces = _names_of_things(log), word_pieces(tokenizer) if tokenizer else []
    rng = random.Random(derive_seed("renamed", seed))
    return [*log, *(_renamed(trajectory, names, rng, pieces) for _ in range(copies) for trajectory in log)]


def _names_of_things(log: Sequence[Trajectory]) -> frozenset[str]:
    shown: dict[str, set[str]] = {}
    acted: dict[str, set[str]] = {}
    for t in log:
        shown.setdefault(t.task_id, set()).update(_words(t.start), *(_words(u.observation) for u in t.turns))
        acted.setdefault(t.task_id, set()).update(*(_words(u.action) for u in t.turns))
    tasks, named = (Counter(word for words in by.values() for word in words) for by in (shown, acted))
    return frozenset(
        word for word, n in tasks.items() if n <= _COMMON * len(shown) and named[word] >= max(1, _NAMED * n)
    )


def _renamed(trajectory: Trajectory, names: frozenset[str], rng: random.Random, pieces: Sequence[str]) -> Trajectory:
    shown, acted_first = _words(trajectory.start), set[str]()
    for turn in trajectory.turns:
        acted_first |= _words(turn.action) - shown
        shown |= _words(turn.observation)
    texts = [trajectory.start, *trajectory.world_facts]
    texts += [text for u in trajectory.turns for text in (u.action, u.observation, str(u.info.get("reasoning", "")))]
    known = {word.lower() for text in texts for word in _LETTERS.findall(text)}  # names of pieces may be short
    new_names: dict[str, str] = {}
    for word in sorted((shown & names) - acted_first):
        new_names[word] = _made_up_word(known, rng, pieces)
        known.add(new_names[word])

    def new_name(match: re.Match[str]) -> str:
        word = match[0]
        name = new_names.get(word.lower(), word)
        return name.capitalize() if word[0].isupper() and name != word else name

    def rename(text: str) -> str:
        return _WORD.sub(new_name, text)

    def rename_turn(turn: Turn) -> Turn:
        info = {key: rename(str(value)) if key == "reasoning" else value for key, value in turn.info.items()}
        return replace(turn, action=rename(turn.action), observation=rename(turn.observation), info=info)

    turns = tuple(map(rename_turn, trajectory.turns))
    facts = tuple(map(rename, trajectory.world_facts))
    return replace(trajectory, start=rename(trajectory.start), turns=turns, trace=None, world_facts=facts)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _made_up_word(known: set[str], rng: random.Random, pieces: Sequence[str]) -> str:
    """One to three syllables, or one or two pieces, that are no word of the episode."""

    def syllable() -> str:
        closed = rng.choice((False, True))
        return rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + (rng.choice(_CONSONANTS) if closed else "")

    while True:
        if pieces and rng.random() < _OF_PIECES:
            word = "".join(rng.choices(pieces, k=rng.randint(1, 2)))
        else:
            word = "".join(syllable() for _ in range(rng.randint(1, 3)))
        if word not in known:
            return word


# --- misspelt names: what the world refuses, as no thing is called so ---
#
# Policies misspell names, and scripted agents hardly do. A world model that has seldom seen it answers as if the thing
# were there, and a policy that dreams in it learns to go on where the world would have refused.

_EVIDENCE = 5  # refusals of unknown names, of a template's slot, that are enough for a law
_NAME = re.compile(r"\w[\w .-]*")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789_."


def with_misspelt(log: Sequence[Trajectory], share: float, refusals: str, seed: int) -> list[Trajectory]:
    """The log, in which before ``share`` of the actions that name something the same action stands with that name
    misspelt, and is refused. What follows stays as it was, as a refused action changes nothing.

    That it is refused is a law of the log: actions of this template with a name there that neither the facts of the
    task, nor a text, nor an action before has, always were. It is refused in the most usual of their words.

    Args:
        refusals: a regular expression of answers that refuse; empty takes what the log teaches (``learn_refusals``).
    """
    if not share:
        return [*log]
    learned = learn_refusals(log)
    templates = find_templates(turn.action for episode in log for turn in episode.turns)
    rng = random.Random(derive_seed("misspelt", seed))

    def refused(turn: Turn) -> bool:
        if turn.reward or turn.terminated:
            return False
        return bool(
            re.search(refusals, turn.observation) if refusals else learned.refuses(turn.action, turn.observation)
        )

    # by template and slot, how unknown names were refused; None where one was not
    answers: dict[tuple[str, int], Counter[str | None]] = {}
    for episode in log:
        for turn, known in _with_known(episode):
            action = templates.read(turn.action)
            unknown = [k for k, name in enumerate(action.written, 1) if name.lower() not in known]
            if len(unknown) == 1 and all(map(_NAME.fullmatch, action.written)):
                words = blank(turn.observation.strip(), action.written) if refused(turn) else None
                answers.setdefault((action.template, unknown[0]), Counter())[words] += 1
    usual = {key: words.most_common(1)[0] for key, words in answers.items() if None not in words}
    laws = {key: words for key, (words, times) in usual.items() if words is not None and times >= _EVIDENCE}

    def misspelt(turn: Turn, known: str, names: Sequence[str]) -> Iterator[Turn]:
        action = templates.read(turn.action)
        slots = [slot for slot in range(1, len(action.written) + 1) if (action.template, slot) in laws]
        if slots and rng.random() < share and not refused(turn):
            slot = rng.choice(slots)
            name = action.written[slot - 1]
            wrong = _misspelt(name, rng.choice(names), rng)
            if wrong and wrong.lower() not in known and turn.action.count(name) == 1:
                named = [*action.written[: slot - 1], wrong, *action.written[slot:]]
                yield Turn(turn.action.replace(name, wrong), fill(laws[action.template, slot], named), 0.0, False)
        yield turn

    def changed(episode: Trajectory) -> Trajectory:
        names = [name for turn in episode.turns for name in templates.read(turn.action).written]
        turns = (new for turn, known in _with_known(episode) for new in misspelt(turn, known, names))
        return replace(episode, turns=tuple(turns), trace=None)

    return [changed(episode) for episode in log]


def _with_known(episode: Trajectory) -> Iterator[tuple[Turn, str]]:
    """Each turn, and in lower case all that was known before it: facts, texts and actions."""
    known = "\n".join((episode.start, *episode.world_facts)).lower()
    for turn in episode.turns:
        yield turn, known
        known += f"\n{turn.action}\n{turn.observation}".lower()


def _misspelt(name: str, other: str, rng: random.Random) -> str:
    """The name with some characters left out, put in or replaced, or with a part of another name."""
    at, length = rng.randrange(len(name)), rng.randint(1, 3)
    letters = "".join(rng.choices(_CHARACTERS, k=length))
    ways = [
        name[:at] + name[at + length :],
        name[:at] + letters + name[at:],
        name[:at] + letters + name[at + length :],
        other[: rng.randint(1, len(other))] + name[at:],
        name[: at + 1] + other[rng.randrange(len(other)) :],
    ]
    return rng.choice(ways).strip()
