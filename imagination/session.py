"""A run at work: its settings and folder, and the log, engines, world model and policies made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from imagination.data.augmentation import HINDSIGHT, read_supplements
from imagination.data.experiences import prefaced, read_experiences
from imagination.rollout import world_models
from imagination.rollout.dream_env import DreamEnv, Guard, Start
from imagination.rollout.engines import Engines, drafts_from
from imagination.rollout.noise import UselessAnswers
from imagination.runs.lifecycle import need, open_run
from imagination.runs.log import read_log, solved_at, unplayed
from imagination.runs.models import context_of, load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.settings import Config
from policy.agent import LanguageModelAgent
from policy.lm.backbone import load_tokenizer
from policy.lm.engine import EngineCannotScore, EngineUnavailable
from policy.lm.engines.openai import OpenAIEngine
from policy.lm.render import ChatFormat
from real_envs.env import TaskSet
from real_envs.trajectory import Trajectory
from worldmodel.calibration import Calibration
from worldmodel.code.world_model import SOURCE, CodeWorldModel, load_world
from worldmodel.diffusion.engine import DiffusionWorldModel, check_trained
from worldmodel.ensemble import EnsembleWorldModel
from worldmodel.formats.full import TransitionFormat
from worldmodel.rewards import GoalWorldModel, KnownRewardsWorldModel, rewarded_actions
from worldmodel.rules.invariants import OUTCOME
from worldmodel.rules.rule_set import RuleSet
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.text import TextWorldModel
from worldmodel.world_model import LanguageWorldModel


class Log(NamedTuple):
    """Logged episodes of the training tasks: those to train on, and those held out for validation."""

    train: list[Trajectory]
    held: list[Trajectory]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy's model and the chat format that it reads and writes."""

    model: Any
    chat: ChatFormat

    @property
    def version(self) -> str:
        """A short hash of its weights as they are now."""
        return weights_version(self.model)


class Session:
    """What a command works with. Log and engines are made once, when they are first asked for."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        self.config, self.run = config, run

    @classmethod
    def open(cls, config: Config, folder: Path, stage: str = "") -> Session:
        """Opens the folder for a ``stage``, and sets torch up."""
        return cls(config, open_run(config, folder, stage))

    @cached_property
    def engines(self) -> Engines:
        """All of them share the device of this process."""
        return Engines(self.config.engine)

    @cached_property
    def log(self) -> Log:
        """See ``read_log``."""
        return Log(*read_log(self.run, self.config.collect.validation))

    @cached_property
    def unplayed(self) -> list[Trajectory]:
        """See ``unplayed`` of the log."""
        return unplayed(self.run)

    @property
    def known(self) -> list[Trajectory]:
        """What a world model may look up: the log that the run trains on, and what resets of other tasks have shown."""
        return [*self.log.train, *self.unplayed]

    def tasks(self, privileged: bool = False) -> TaskSet:
        """The run's tasks and real environments, opened anew; the caller closes them. See ``open_tasks``."""
        return open_tasks(self.run, self.config.env, self.config.collect.workers, privileged)

    @property
    def training_seed(self) -> int:
        """Of start states, rollouts and minibatches."""
        return self.config.seed if self.config.train.seed is None else self.config.train.seed

    @cached_property
    def solved_at(self) -> float | None:
        """Total reward from which a dream is solved; ``None`` is the usual 1."""
        return solved_at(self.run, self.config.worldmodel.goal)

    # the world model

    def world_model(
        self,
        log: Sequence[Trajectory] | None = None,
        temperature: float | None = None,
        served: bool = True,
        name: str = "worldmodel",
    ) -> LanguageWorldModel:
        """The run's world model, ready to predict.

        Args:
            log: to retrieve from, to know facts by, and to look up drafts in; by default ``known``.
            temperature: by default that of dreams.
            served: ask the server where ``engine=openai``; false for weights that it cannot have yet.
            name: of its folder under ``models/``; another than the run's own is loaded alone, not as an ensemble.

        Raises:
            UserError: it is not trained yet, or was trained in another form; or it is code of somebody else.
            EngineCannotScore: an ensemble in an engine that only samples.
            EngineUnavailable: kind=diffusion in an engine that writes from left to right, or kind=code on a system
                that cannot confine it.
        """
        config, run, settings, engine = self.config, self.run, self.config.worldmodel, self.config.engine.name
        world_models.check_writes(settings)
        need(run.model(name), world_models.STAGE)
        alone = settings.members == 1 or name != "worldmodel"
        world_models.check_form(run, settings, config.dream)
        served = served and engine == "openai"
        if not alone and (served or engine == "vllm"):
            raise EngineCannotScore(
                f"engine={engine} cannot score given tokens, which the members of an ensemble do to each "
                "other's predictions: set engine=inprocess, or worldmodel.members=1"
            )
        if settings.kind == "diffusion" and engine != "inprocess":
            raise EngineUnavailable(
                f"engine={engine} writes from left to right and cannot fill in a canvas: set engine=inprocess, or "
                "another worldmodel.kind"
            )
        if settings.kind == "code":
            return self._by_rules(self._code(run.model(name)), log)
        log = self.known if log is None else log
        form = world_models.form_of(settings, log)
        temperature = config.dream.temperature if temperature is None else temperature
        folders = [run.model(name)] if alone else [world_models.member_folder(run, k) for k in range(settings.members)]
        members = [
            self._served(folder, form, temperature) if served else self._member(folder, form, temperature, log)
            for folder in folders
        ]
        return self._by_rules(members[0] if alone else EnsembleWorldModel(members, settings.lead), log)

    def _by_rules(self, model: LanguageWorldModel, log: Sequence[Trajectory] | None) -> LanguageWorldModel:
        """The model behind what the settings let answer in its place: rules, schemas and a declared goal."""
        config, run, settings = self.config, self.run, self.config.worldmodel
        if settings.rules != "off" and (rules := world_models.rules_of(run)) is not None:
            if settings.goal.declared:  # it decides reward and end after the model, whatever the model says of them
                rules = RuleSet(rules.language, rules.rules, [i for i in rules.invariants if i.phrase != OUTCOME])
            model = RuledWorldModel(model, rules, settings.rules, settings.resamples)
        log = self.known if log is None else log
        model = world_models.with_declared(model, config.env.name, settings, log)
        return GoalWorldModel(model, settings.goal) if settings.goal.declared else model

    def _code(self, folder: Path) -> CodeWorldModel:
        code = self.config.worldmodel.code
        return load_world(need(folder / SOURCE, world_models.STAGE).parent, code.trust, code.seconds, code.megabytes)

    def _served(self, folder: Path, form: TransitionFormat, temperature: float) -> TextWorldModel:
        """The model of a server, read and written by the tokenizer of ``folder``."""
        chat = ChatFormat(load_tokenizer(need(folder, world_models.STAGE)))
        engine = OpenAIEngine(self.config.worldmodel.context, self.config.engine)
        version = f"served/{self.config.engine.served_model}"
        return TextWorldModel(engine, chat, version, self.config.dream.max_tokens, temperature, form)

    def _member(
        self, folder: Path, form: TransitionFormat, temperature: float, log: Sequence[Trajectory]
    ) -> TextWorldModel:
        settings, max_tokens = self.config.worldmodel, self.config.dream.max_tokens
        model, chat = load_model(folder, world_models.STAGE, settings)
        model.requires_grad_(False)
        context = context_of(model, settings)
        if settings.kind == "diffusion":
            check_trained(model, folder, settings.diffusion.block)
            filler = self.engines.make_canvas(model, chat, context, settings.diffusion)
            return DiffusionWorldModel(filler, chat, weights_version(model), max_tokens, temperature, form)
        engine = self.engines.make(model, chat, context, drafts_from(log, chat, form))
        return TextWorldModel(engine, chat, weights_version(model), max_tokens, temperature, form)

    def guard(self, ends: bool = True, name: str = "worldmodel") -> Guard:
        """When dreams of the world model ``name`` are cut; see ``guard_of``."""
        return world_models.guard_of(self.run, self.config.worldmodel, self.config.dream, ends, name)

    def calibration(self, needed_by: str) -> Calibration:
        """The calibration of the run's world model, which the setting ``needed_by`` needs; see ``calibration_of``."""
        return world_models.calibration_of(self.run, self.config.worldmodel, self.config.dream, needed_by)

    def dreams(
        self, model: LanguageWorldModel, starts: Mapping[str, Start], log: Sequence[Trajectory] | None = None
    ) -> Callable[[], DreamEnv]:
        """Makes environments that dream from ``starts``, as training does: with probabilities where they are known.

        ``log``: of the tasks that are dreamed; by default what the run trains on.
        """
        calibration = Calibration.load(self.run.model("worldmodel"))
        guard = self.guard(ends=self.config.dream.on_doubt != "downweight")
        dream = self.config.dream
        model = self.paying(model, log)
        if log is None:
            log = self.log.train if dream.noise else ()
        log = self.config.worldmodel.goal.relabel_log(log)
        noise = UselessAnswers(log, dream.noise_actions) if dream.noise and dream.noise_actions else None
        return lambda: DreamEnv(model, starts, guard, calibration, noise)

    def paying(self, model: LanguageWorldModel, log: Sequence[Trajectory] | None = None) -> LanguageWorldModel:
        """The model as it pays in dreams, see ``dream.known_rewards``; ``log`` as in ``dreams``."""
        if not self.config.dream.known_rewards:
            return model
        log = self.config.worldmodel.goal.relabel_log(self.log.train if log is None else log)
        return KnownRewardsWorldModel(model, rewarded_actions([*log, *self.reached_goals()]))

    def reached_goals(self) -> list[Trajectory]:
        """Failed episodes with goals that they reached, or those of composed questions, each a task of its own, where
        dreams are to begin there. Raises ``UserError``: none were written yet.
        """
        reached = read_supplements(self.run, [HINDSIGHT]) if self.config.dream.hindsight else []
        return [replace(episode, task_id=episode.id) for episode in reached]

    # the policy

    def policy(self, folder: str | Path = "policy-clone") -> Policy:
        """A policy of the run: ``folder`` is that of its model, or its name under ``models/``. Raises ``UserError``: an
        earlier stage has not made it yet.
        """
        path = folder if isinstance(folder, Path) else self.run.model(folder)
        model, chat = load_model(path, "clone" if path.name == "policy-clone" else "train", self.config.policy)
        if self.config.experience:
            experiences = need(self.run.model(self.config.experience), "learn-experience")
            chat = prefaced(chat, read_experiences(experiences))
        return Policy(model, chat)

    def agent(
        self, policy: Policy, temperature: float = 1.0, name: str = "policy", slots: int | None = None
    ) -> LanguageModelAgent:
        """The policy as it plays, sampling from its weights as they were when its engine's were last updated.

        Args:
            slots: at most so many in an engine that shares no step with others; by default it shares the device.
        """
        engines = self.engines
        if slots is not None:
            engines = Engines(replace(self.config.engine, slots=min(self.config.engine.slots, slots)))
        engine = engines.make(policy.model, policy.chat, context_of(policy.model, self.config.policy))
        longest, summary = self.config.max_action_tokens, self.config.summary_tokens
        return LanguageModelAgent(engine, policy.chat, longest, temperature, name, summary)
