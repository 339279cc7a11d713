"""What the settings say of the world model: its form, its guard, and whether it fits what the run has."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from imagination.rollout.dream_env import Guard
from imagination.runs.run_folder import RunFolder
from imagination.settings import DreamSettings, UserError, WorldModelSettings
from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory, Turn
from real_envs.world import find_world
from worldmodel.calibration import FILE, Calibration
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import DELIMITER, FullObservation, TransitionFormat, prompt_tokens
from worldmodel.formats.memory import MemoryFormat, TaskMemory, declared_facts
from worldmodel.formats.reasoning import INSTRUCTION, ReasoningFormat, reasoning_of
from worldmodel.formats.retrieval import RetrievalFormat, TransitionIndex
from worldmodel.rules.rule_set import RuleSet, RulesInvalid
from worldmodel.rules.world_model import AnsweredActions, DeclaredAnswer, DeclaredAnswers
from worldmodel.world_model import LanguageWorldModel

STAGE = "fit-world-model"
UNFINISHED = "unfinished"


def form_of(settings: WorldModelSettings, log: Sequence[Trajectory]) -> TransitionFormat:
    """How the world model writes transitions; ``log`` is what it retrieves from and knows ``facts`` from.

    Raises:
        UserError: there is nothing to retrieve from, or it writes no text.
    """
    check_writes(settings)
    if any(turn.reward is None for episode in log for turn in episode.turns):
        log = settings.goal.relabel_log(log)  # what it is fitted to, see ``rewarded``
    form = _form_of_answers(settings, log)
    if settings.facts:
        form = MemoryFormat(TaskMemory(log), settings.facts, form)
    if not settings.reasoning_tokens:
        return form
    # what starts at random reads no instruction, and would only have it in its context
    return ReasoningFormat(form, settings.reasoning_tokens, INSTRUCTION if settings.follows_instructions else "")


def check_writes(settings: WorldModelSettings) -> None:
    """Raises ``UserError``: the world model draws screens, and no policy can dream in those."""
    if settings.kind == "screen":
        raise UserError(
            "worldmodel.kind=screen draws screens and no text, so no policy can dream in it: it is for "
            "fit-world-model, audit and compare. Set worldmodel.kind=text, delta or retrieval here"
        )


def _form_of_answers(settings: WorldModelSettings, log: Sequence[Trajectory]) -> TransitionFormat:
    if settings.kind == "delta":
        return EditFormat(settings.edited_in_full)
    if settings.kind == "retrieval":
        try:
            return RetrievalFormat(TransitionIndex(log), settings.neighbours)
        except ValueError as error:
            raise UserError(f"worldmodel.kind=retrieval: {error}") from error
    return FullObservation()


def trained_as(settings: WorldModelSettings) -> str:
    """What a model was trained to read and write, in a word: another form needs another training."""
    form: str = settings.kind
    if form == "retrieval":
        form += f"-{settings.neighbours}"
    if form == "delta":  # the word alone is of models from before texts stood there in full
        form += "-full" if settings.edited_in_full else "-brief"
    if form == "diffusion":
        form += f"-{settings.diffusion.block}"
    if settings.facts:
        form += "+facts"
    return f"{form}+reasoning" if settings.reasoning_tokens else form


def as_trained(run: RunFolder, settings: WorldModelSettings) -> WorldModelSettings:
    """The settings with the kind that the run's world model of text was trained as, whatever they ask for."""
    form = run.summary.get("world_model_form", "text")
    others: tuple[Literal["delta", "retrieval", "diffusion", "code"], ...] = ("delta", "retrieval", "diffusion", "code")
    return replace(settings, kind=next((kind for kind in others if form.startswith(kind)), "text"))


def member_folder(run: RunFolder, member: int) -> Path:
    """``models/worldmodel``, ``models/worldmodel-1``, ..."""
    return run.model(f"worldmodel-{member}" if member else "worldmodel")


def declared_of(env: str, exact: str, log: Sequence[Trajectory]) -> dict[str, DeclaredAnswer]:
    """What ``worldmodel.exact`` takes from the world itself, by part (``World.refusal``, ``World.user_answer``).

    Args:
        log: whose facts say what the user of a task wants.

    Raises:
        UserError: the world declares no such part.
    """
    if exact == "off":
        return {}
    world = find_world(env)
    refusal: Any = getattr(world, "refusal", None)
    user_answer: Any = getattr(world, "user_answer", None)
    if refusal is None or (exact == "user" and user_answer is None):
        raise UserError(f"env={env} declares no {'users' if refusal else 'schemas of tools'}: set worldmodel.exact=off")

    def refused(start: str, history: Sequence[Turn], action: str) -> tuple[str, float, bool] | None:
        text = refusal(start, history, action)
        return None if text is None else (text, 0.0, False)

    return {"schema": refused, "user": _by_facts(user_answer, log)} if exact == "user" else {"schema": refused}


def with_declared(
    model: LanguageWorldModel, env: str, settings: WorldModelSettings, log: Sequence[Trajectory]
) -> LanguageWorldModel:
    """The model behind what ``worldmodel.exact`` takes from the world itself; see ``declared_of``."""
    declared = declared_of(env, settings.exact, log)
    world = find_world(env) if "user" in declared else None
    if (is_answered := getattr(world, "is_answered", None)) is not None and world is not None:
        model = AnsweredActions(model, _by_facts(is_answered, log), world.invalid, settings.resamples)
    for part, answer in declared.items():
        model = DeclaredAnswers(model, part, answer)
    return model


def _by_facts(function: Callable[..., Any], log: Sequence[Trajectory]) -> Callable[[str, Sequence[Turn], str], Any]:
    """A function of an episode and the facts of its task, which the log knows by how the task begins."""
    facts = declared_facts(log)
    return lambda start, history, action: function(start, history, action, facts.get(start, ()))


def rules_of(run: RunFolder) -> RuleSet | None:
    """The rules that were mined from the run's log, ``None`` where none were found.

    Raises:
        UserError: their file cannot be read.
    """
    try:
        rules = RuleSet.load(run.path / "models")
    except RulesInvalid as error:
        raise UserError(f"{error}; run `imagine rules` to find them again, or set worldmodel.rules=off") from error
    return rules if rules is not None and (rules.rules or rules.invariants) else None


def guard_of(run: RunFolder, settings: WorldModelSettings, dream: DreamSettings, ends: bool, name: str) -> Guard:
    """The guard that the settings ask for, with the calibration of the world model ``name`` where it needs one.

    ``ends``: an uncertain turn ends the dream; otherwise it is marked and the dream goes on.

    Raises:
        UserError: the world model has no calibration for these settings.
    """
    calibration = None
    if dream.min_probability > 0:
        calibration = calibration_of(run, settings, dream, f"dream.min_probability={dream.min_probability:g}", name)
    best = None if settings.goal.declared else run.summary.get("best_return")  # not in runs of earlier versions
    least = (dream.min_confidence, dream.min_outcome_confidence)
    return Guard(*least, ends, dream.min_probability, calibration, math.inf if best is None else best)


def calibration_of(
    run: RunFolder, settings: WorldModelSettings, dream: DreamSettings, asks: str, name: str = "worldmodel"
) -> Calibration:
    """The calibration of the world model ``name``, which the setting ``asks`` needs.

    Raises:
        UserError: there is none, or it was fitted to answers at another temperature or to another goal.
    """
    calibration = Calibration.load(run.model(name))
    if calibration is None:
        raise UserError(f"{asks} needs {run.model(name) / FILE}; run `imagine {STAGE}` with this version")
    if calibration.temperature != dream.temperature:
        raise UserError(
            f"{asks}: {run.model(name) / FILE} is of answers at temperature {calibration.temperature:g}; set "
            f"dream.temperature={calibration.temperature:g}, or run `imagine {STAGE}` with "
            f"dream.temperature={dream.temperature:g}"
        )
    if calibration.goal != settings.goal.observation:
        raise UserError(
            f"{asks}: {run.model(name) / FILE} was fitted with worldmodel.goal.observation={calibration.goal!r}; run "
            f"`imagine {STAGE}` with the goal of now"
        )
    return calibration


def check_form(run: RunFolder, settings: WorldModelSettings, dream: DreamSettings) -> None:
    """Raises ``UserError``: the run's world model was trained in another form than the settings say, or not to its end;
    or it has no room to reason.
    """
    check_room(settings, dream)
    trained = run.summary.get("world_model_form", "text")  # runs from before there were forms have whole texts
    if trained == UNFINISHED:
        raise UserError(f"the world model of this run was not trained to its end; run `imagine {STAGE}` first")
    if trained != (wanted := trained_as(settings)):
        raise UserError(
            f"the world model of this run was trained as {trained}, not as {wanted}; run `imagine {STAGE}` "
            "with these settings first, or set worldmodel.kind (worldmodel.neighbours, worldmodel.edited_in_full, "
            "worldmodel.reasoning_tokens, worldmodel.diffusion.block) back"
        )


def check_room(settings: WorldModelSettings, dream: DreamSettings) -> None:
    """Raises ``UserError``: not even an empty history leaves room to think and to predict."""
    answer = dream.max_tokens
    if settings.reasoning_tokens and settings.reasoning_tokens + answer >= settings.context:
        raise UserError(
            f"worldmodel.context={settings.context} has no room for a history beside "
            f"worldmodel.reasoning_tokens={settings.reasoning_tokens} and dream.max_tokens={answer}: raise it, or "
            "lower one of those"
        )


def thoughts_of(settings: WorldModelSettings, log: Sequence[Trajectory]) -> list[str]:
    """The reasoning in the log, turn by turn; none where the world model does not reason.

    Raises:
        UserError: it should reason, and nothing could teach it; or a logged reasoning cannot be one.
    """
    if not settings.reasoning_tokens:
        return []
    try:
        thoughts = [thought for t in log for turn in t.turns if (thought := reasoning_of(turn)) is not None]
    except ValueError as error:
        raise UserError(f"worldmodel.reasoning_tokens: {error}; mend the log") from error
    if not thoughts and not settings.follows_instructions:
        raise UserError(
            "a world model from scratch has nothing to learn reasoning from: no turn of the log has a text "
            'info["reasoning"]. Add some, set worldmodel.model to a pretrained chat model, or '
            "worldmodel.reasoning_tokens=0"
        )
    return thoughts


def check_thoughts(
    max_tokens: int,
    thoughts: Sequence[str],
    log: Sequence[Trajectory],
    chat: ChatFormat,
    form: TransitionFormat,
    context: int,
) -> None:
    """What needs the tokenizer; ``max_tokens`` are those of a predicted answer.

    Raises:
        UserError: more than one in a hundred logged thoughts is longer than it may be, or more than one in a hundred
            first turns leaves no room to think and to predict.
    """
    if not form.reasoning_tokens:
        return
    line = len(chat.encode(DELIMITER))
    sizes = [len(chat.encode(thought)) + line for thought in thoughts]
    long = sum(size > form.reasoning_tokens for size in sizes)
    if long > 0.01 * len(sizes):
        raise UserError(
            f"{long} of {len(sizes)} logged thoughts are longer than "
            f"worldmodel.reasoning_tokens={form.reasoning_tokens}; the longest is {max(sizes)} with the line that "
            "ends it"
        )
    starts = {(t.start, t.turns[0].action) for t in log}
    first = [len(prompt_tokens(chat, form, start, [], action).ids) for start, action in starts]
    needed = [size + form.reasoning_tokens + max_tokens for size in first]
    if sum(size > context for size in needed) > 0.01 * len(needed):
        raise UserError(
            f"the first turn of an episode needs up to {max(needed)} tokens to read, think and predict, but the "
            f"context has {context}: raise worldmodel.context, or lower worldmodel.reasoning_tokens or dream.max_tokens"
        )


def note_unended(measured: Mapping[str, Any], limit: int) -> None:
    """Tells the user where more than a tenth of the answers on held-out turns never came to a prediction."""
    unended, n = measured["invalid_reasoning"], measured["n"]
    if unended > 0.1 * n:
        print(
            f"note: in {unended} of {n} held-out turns the world model did not end its reasoning within {limit} "
            "tokens; raise worldmodel.reasoning_tokens, or add reasoning to the log, which shows how to end it",
            file=sys.stderr,
        )
