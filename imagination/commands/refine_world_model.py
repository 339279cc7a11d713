"""Stage ``refine-world-model``: RL on how right its predictions of logged turns are (RLVR-World, arXiv 2505.13934).

Supervised training makes logged words likely; dreams need the whole answer right. Only logged histories are continued,
never its own words. A model that reasons first (``worldmodel.reasoning_tokens``) samples a reasoning with each answer,
and all that it sampled is trained by how right the answer is; answers that never end one are ``malformed``.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from imagination.data.batches import truncate
from imagination.evaluation.world_model_eval import measure
from imagination.learning.advantages.group import informative
from imagination.learning.algorithms import Algorithm, build_algorithm
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import make_trainer, step_loader
from imagination.rollout.engines import drafts_from
from imagination.rollout.schedules import added_episodes
from imagination.rollout.world_models import check_form, form_of
from imagination.runs.lifecycle import resume_from, run_stage
from imagination.runs.log import rewarded
from imagination.runs.models import adapted, context_of, load_model
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import AlgorithmSettings, Config, UserError
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row
from policy.lm.engine import Completion, ContextFull, Engine, EngineFailure, Sampling
from policy.lm.render import ChatFormat
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory, Turn
from worldmodel.evaluation.behaviour import behaviour_similarity, embedding_distances
from worldmodel.formats.full import TransitionFormat, prompt_tokens
from worldmodel.objective import Parsed, transition_weights, verifiable_reward, world_model_rows
from worldmodel.text import parse_completion
from worldmodel.world_model import PredictionInvalid

NAME = "refine_world_model"
CANDIDATE, BEFORE = "worldmodel-refined", "worldmodel-before"


def refine_world_model(config: Config, folder: Path) -> None:
    """Optional: refine the world model by RL, with the correctness of its predictions as reward.

    Samples several predictions per logged action, compares them with the log, and updates the model by GRPO.
    The result replaces the world model only if it is no worse on held-out episodes. Run it before `clone`,
    whose policy starts from the world model.

    Reads: log/, models/worldmodel/
    Writes: models/worldmodel/, models/worldmodel-before/, or models/worldmodel-refined/ where it is worse

    Examples:
        imagine refine-world-model run=mine
        imagine refine-world-model run=mine refine.metric=diff_f1 refine.lr=2e-5

    Raises:
        UserError: settings that cannot work, no held-out episode to judge by, or an earlier stage is missing.
    """
    algorithm = check(config)
    with run_stage(config, folder, NAME) as run:
        session = Session(config, run)
        if not session.log.held:
            raise UserError("nothing is held out to judge the refined model by: raise collect.validation")
        check_form(run, config.worldmodel, config.dream)
        _train(session, algorithm)
        before, after = measure(session), measure(session, CANDIDATE)
        better = no_worse(before, after)
        measured = {"before": before["exact_match"], "after": after["exact_match"], "promoted": better, "n": after["n"]}
        if better:
            _promote(run)
            run.update({"world_model": after, "done": {"train": "", "evaluate": ""}})  # they were by the model before
        run.update({"refined": measured, "real_steps": {NAME: 0}})
    verdict = "takes its place" if better else f"is worse and stays in {run.model(CANDIDATE)}"
    print(
        f"exact match on {after['n']} held-out turns: {before['exact_match']:.3f} before, {after['exact_match']:.3f} "
        f"after: the refined world model {verdict}"
    )


def no_worse(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the refined model answers as many held-out turns exactly. Turns at which generation broke are in neither
    share, so a model that breaks on some of them may only have been spared the hard ones, and is not judged better."""
    return after["failed"] <= before["failed"] and (after["exact_match"] or 0.0) >= (before["exact_match"] or 0.0)


def check(config: Config) -> Algorithm:
    """The algorithm that refines. Raises ``UserError``: the settings cannot work together."""
    if config.refine.group_size < 2:
        raise UserError("refine.group_size must be 2 or more: GRPO compares the answers to one action")
    algorithm = build_algorithm(grpo(config))
    if config.worldmodel.members > 1:
        raise UserError("an ensemble cannot be refined, only a single model: set worldmodel.members=1")
    if config.worldmodel.kind == "diffusion":
        raise UserError(
            "worldmodel.kind=diffusion cannot be refined: RL needs log-probs of what was sampled, and a canvas has "
            "none; refine another kind"
        )
    if config.worldmodel.kind == "code":
        raise UserError(
            "worldmodel.kind=code has no weights to refine: `imagine fit-world-model` again with another "
            "worldmodel.code.model or more worldmodel.code.rounds, or refine another kind"
        )
    return algorithm


def _train(session: Session, algorithm: Algorithm) -> None:
    config, run, settings = session.config, session.run, session.config.refine
    train = rewarded(run, session.log.train, config.worldmodel.goal)
    model, chat = load_model(run.model("worldmodel"), "fit-world-model", config.worldmodel)
    model = adapted(model, config.worldmodel)
    state, done = resume_from(run, NAME)
    run.forget(NAME, done)
    form = form_of(config.worldmodel, train)
    context = context_of(model, config.worldmodel)
    bar = Bar("refine world model", settings.updates, "answers")
    answers = Answers(
        engine=session.engines.make(model, chat, context, drafts_from(train, chat, form)),
        chat=chat,
        form=form,
        log=train,
        weights=transition_weights(train, config.worldmodel.rarity),
        config=config,
        similar=_similar(session),
        on_answer=bar.count,
    )
    module = PolicyModule(
        model,
        algorithm,
        replace(
            config.train,
            updates=settings.updates,
            lr=settings.lr,
            minibatches=settings.minibatches,
            epochs=1,
            expert_coef=settings.supervised_coef,
            expert_form="cross_entropy",
            process_coef=0.0,
        ),
        lambda step, metrics: run.record(NAME, step, metrics),
        seed=derive_seed("refine", config.seed),
    )
    stream = step_loader(settings.updates, module.done, answers.update)
    trainer = make_trainer(run, NAME, bar, module.done, max(1, settings.updates // 5))
    trainer.fit(module, stream, ckpt_path=state, weights_only=True)
    save_checkpoint(model, chat.tokenizer, run.model(CANDIDATE))


def _similar(session: Session) -> Callable[[Sequence[tuple[_Asked, str]]], list[float]] | None:
    """How like the true observation a predicted one is, for a metric that a frozen model decides."""
    settings, run = session.config.refine, session.run
    if settings.metric == "behr":
        policy = session.policy(settings.policy)
        context = context_of(policy.model, session.config.policy)

        def behaves(asked: Sequence[tuple[_Asked, str]]) -> list[float]:
            further = [(k, one, text) for k, (one, text) in enumerate(asked) if one.index + 1 < len(one.episode.turns)]
            questions = [
                ((one.episode.start, turns[:-1], turns[-1].action), text, one.turn.observation)
                for _, one, text in further
                for turns in [one.episode.turns[: one.index + 2]]
            ]
            found = behaviour_similarity(policy.model, policy.chat, questions, context)
            alike = [0.0] * len(asked)  # of a last turn, where nobody acts any more
            for (k, _, _), value in zip(further, found, strict=True):
                alike[k] = value
            return alike

        return behaves
    if settings.metric == "embedding":
        model, chat = load_model(run.model("worldmodel"), "fit-world-model", session.config.worldmodel)

        def means_the_same(asked: Sequence[tuple[_Asked, str]]) -> list[float]:
            far = embedding_distances(model, chat, [(text, one.turn.observation) for one, text in asked])
            return [float(distance <= settings.distance) for distance in far]

        return means_the_same
    return None


def grpo(config: Config) -> AlgorithmSettings:
    """GRPO that clips and scales as ``algorithm.*`` says where the policy learns by GRPO too, and adds nothing."""
    shared = ("clip_low", "clip_high", "dual_clip", "normalise_std", "std_eps", "tis_cap")
    keys = shared if config.algorithm.name == "grpo" else ("tis_cap",)
    return AlgorithmSettings(**{key: getattr(config.algorithm, key) for key in keys})


def _promote(run: RunFolder) -> None:
    """The candidate becomes the run's world model; nothing is lost where this is cut off between two renames."""
    shutil.rmtree(run.model(BEFORE), ignore_errors=True)
    run.model("worldmodel").rename(run.model(BEFORE))
    run.model(CANDIDATE).rename(run.model("worldmodel"))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A logged turn that is to be predicted: turn ``index`` of an episode."""

    episode: Trajectory
    index: int

    @property
    def turn(self) -> Turn:
        return self.episode.turns[self.index]

    @property
    def before(self) -> str:
        return self.episode.turns[self.index - 1].observation if self.index else self.episode.start


@dataclass(slots=True)
class Answers:
    """Asks the model about logged turns and makes rows of what it answers."""

    engine: Engine
    chat: ChatFormat
    form: TransitionFormat
    log: Sequence[Trajectory]
    # how often each turn of each episode is asked about, relative to others; 0 for unmeasured rewards
    weights: Sequence[Sequence[float]]
    config: Config
    similar: Callable[[Sequence[tuple[_Asked, str]]], list[float]] | None = None  # of predicted texts, in [0, 1]
    on_answer: Callable[[], None] | None = None

    def update(self, index: int) -> Update:
        """A pure function of the update's index, the seed and the model's weights."""
        settings = self.config.refine
        self.engine.update_weights()
        rng = random.Random(derive_seed("refine", self.config.seed, index))
        questions = self._choose(rng, settings.turns)
        answers = asyncio.run(self._ask(questions, index))
        rows, metrics = self._rows(questions, answers)
        extra = added_episodes(len(rows), settings.supervised_share)
        for k in rng.sample(range(len(self.log)), min(extra, len(self.log))):
            logged = world_model_rows(self.chat, self.log[k], self.weights[k], self.form)
            logged = [row for row in (truncate(row, self.engine.context) for row in logged) if row.ce_weight.any()]
            if logged:  # several where reasoning was logged; the share counts rows
                rows.append(logged[0] if len(logged) == 1 else rng.choice(logged))
        return Update(index, rows, metrics, exact=self.engine.exact)

    def _choose(self, rng: random.Random, n: int) -> list[_Asked]:
        places = [(t, k) for t, weights in enumerate(self.weights) for k, w in enumerate(weights) if w > 0]
        weights = [self.weights[t][k] for t, k in places]
        return [_Asked(self.log[t], k) for t, k in rng.choices(places, weights, k=n)]

    async def _ask(self, questions: Sequence[_Asked], index: int) -> list[tuple[list[int], list[Completion | None]]]:
        """The prompt of each turn with the answers to it; ``None`` where the engine failed or the context is full."""
        settings = self.config.refine
        sampling = Sampling(self.config.dream.max_tokens + self.form.reasoning_tokens, self.chat.stop)

        async def one(ids: list[int], seed: int) -> Completion | None:
            try:
                completion = await self.engine.complete(ids, sampling, seed)
            except (EngineFailure, ContextFull):
                return None
            if self.on_answer is not None:
                self.on_answer()
            return completion

        async def turn(number: int, one_asked: _Asked) -> tuple[list[int], list[Completion | None]]:
            episode, history = one_asked.episode, one_asked.episode.turns[: one_asked.index]
            form = self.form.excluding([episode])
            ids = prompt_tokens(self.chat, form, episode.start, history, one_asked.turn.action).ids
            seeds = [derive_seed("answer", self.config.seed, index, number, k) for k in range(settings.group_size)]
            return ids, list(await asyncio.gather(*(one(ids, seed) for seed in seeds)))

        return list(await asyncio.gather(*(turn(n, a) for n, a in enumerate(questions))))

    def _read(self, question: _Asked, completion: Completion) -> Parsed | None:
        start, history = question.episode.start, question.episode.turns[: question.index]
        limit = self.config.dream.max_tokens
        try:
            prediction = parse_completion(self.chat, self.form, (), completion, start, history, limit).prediction
        except PredictionInvalid:
            return None
        return prediction.observation, prediction.reward, prediction.terminated

    def _rows(
        self, questions: Sequence[_Asked], answers: Sequence[tuple[list[int], list[Completion | None]]]
    ) -> tuple[list[Row], dict[str, float]]:
        settings = self.config.refine
        groups, valid = [], []
        judged: list[tuple[_Asked, Parsed | None]] = []
        for number, (one, (_, completions)) in enumerate(zip(questions, answers, strict=True)):
            for completion in completions:
                judged.append((one, None if completion is None else self._read(one, completion)))
                groups.append(number)
                valid.append(completion is not None)
        similar = [0.0] * len(judged)
        if self.similar is not None:
            read = [(k, one, predicted[0]) for k, (one, predicted) in enumerate(judged) if predicted is not None]
            for (k, _, _), value in zip(read, self.similar([(one, text) for _, one, text in read]), strict=True):
                similar[k] = value
        rewards = [
            verifiable_reward(settings.metric, one.before, predicted, one.turn, alike)
            for (one, predicted), alike in zip(judged, similar, strict=True)
        ]
        exact = sum(verifiable_reward("exact", one.before, predicted, one.turn) == 1 for one, predicted in judged)
        malformed = sum(known and predicted is None for (_, predicted), known in zip(judged, valid, strict=True))
        # groups of equal answers have no gradient, and are not in the share of logged episodes either
        useful = informative(torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid)).tolist()
        every = [(ids, completion) for ids, completions in answers for completion in completions]
        rows = [
            _row(ids, completion, reward, group)
            for (ids, completion), reward, group, wanted in zip(every, rewards, groups, useful, strict=True)
            if completion is not None and wanted
        ]
        n = max(1, sum(valid))
        counts = {
            "reward": sum(r for r, v in zip(rewards, valid, strict=True) if v) / n,
            "exact_sampled": exact / n,
            "malformed": malformed / n,
            "failures": float(len(valid) - sum(valid)),
            "rows_with_gradient": len(rows) / n,
        }
        return rows, counts


def _row(prompt: Sequence[int], completion: Completion, reward: float, group: int) -> Row:
    """An episode of one turn, whose prompt is the history."""
    before, made = len(prompt), len(completion.ids)
    return Row(
        [*prompt, *completion.ids],
        [False] * before + [True] * made,
        Source.REAL,
        behavior_logprobs=[math.nan] * before + list(completion.logprobs),
        rl_weight=[0.0] * before + [1.0] * made,
        turns=[-1] * before + [0] * made,
        rewards=[reward],
        group=group,
    )
