"""An ensemble of world models: one member predicts, all score the prediction.

Members share tokenizer, log and order of the data, and differ in their random initialisation.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from policy.lm.engine import Engine, scorer
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn
from worldmodel.text import ParsedPrediction, TextWorldModel
from worldmodel.world_model import Prediction


def log_mean(logprobs: Sequence[float]) -> float:
    """Log of the mean of probabilities given by their logs; ``-inf`` where all are."""
    top = max(logprobs)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(x - top) for x in logprobs) / len(logprobs))


def disagreement(logprobs: Sequence[float]) -> float:
    r"""How much one prediction tells the members apart, in nats.

    It is 0 where all find the prediction equally likely, and ``log M`` where one member alone finds it possible.

    With :math:`p_m` the probability of the prediction under member m of M and :math:`r_m = p_m / \sum_j p_j` the
    posterior over members after seeing it, this is :math:`\sum_m r_m \log (M r_m)`, the KL divergence of that posterior
    from the uniform prior. Its mean over predictions of the mixture is the mutual information between prediction and
    member, which separates what a model could still learn from what is chance in the world (BALD; Houlsby et al. 2011,
    arXiv 1112.5745, equation 2). Here it is taken at the one prediction that was made.
    """
    mean = log_mean(logprobs)
    if mean == -math.inf:
        return 0.0
    ratios = [math.exp(x - mean) for x in logprobs]  # M r_m
    return max(0.0, sum(r * math.log(r) for r in ratios if r > 0) / len(ratios))


class EnsembleWorldModel:
    """An ensemble of language models behind the protocol of one.

    One member writes the prediction, another one for each turn, drawn uniformly as in MBPO (Janner et al. 2019, arXiv
    1906.08253, section 5), so that a policy cannot exploit the mistakes of a single one. The others score its tokens,
    teacher-forced, without sampling. The confidence is the probability of the prediction under the mixture of all
    members with equal weights (deep ensembles; Lakshminarayanan et al. 2017, arXiv 1612.01474, section 2.4); that of
    the outcome is conditional on the observation under the same mixture. Where members reason, all score the
    prediction given the reasoning of the one that wrote it, with equal weights.

    Args:
        member_selection: who predicts: ``drawn`` by the seed of the turn, or the ``first``. At temperature 0 it is the
            first in either case, so that a greedy world is one world.

    Raises:
        ValueError: fewer than two members, or members that do not read the same tokens.
        EngineCannotScore: an engine that only samples.
    """

    def __init__(
        self, members: Sequence[TextWorldModel], member_selection: Literal["drawn", "first"] = "drawn"
    ) -> None:
        if len(members) < 2:
            raise ValueError(f"an ensemble needs at least two members, got {len(members)}")
        first = members[0].chat
        for member in members[1:]:
            chat = member.chat
            same = (chat.opening, chat.to_assistant, chat.stop, chat.to_user) == (
                first.opening,
                first.to_assistant,
                first.stop,
                first.to_user,
            )
            if not same or chat.tokenizer.get_vocab() != first.tokenizer.get_vocab():
                raise ValueError("members of an ensemble need the same tokenizer: they score each other's tokens")
        self.members, self.member_selection = tuple(members), member_selection
        self._scorers = [scorer(member.engine) for member in members]
        self.version = "+".join(member.version for member in members)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(member.engine for member in self.members)

    @property
    def temperature(self) -> float:
        return self.members[0].temperature

    def at_temperature(self, temperature: float) -> EnsembleWorldModel:
        return EnsembleWorldModel(
            [member.at_temperature(temperature) for member in self.members], self.member_selection
        )

    def excluding(self, episodes: Sequence[Trajectory]) -> EnsembleWorldModel:
        return EnsembleWorldModel([member.excluding(episodes) for member in self.members], self.member_selection)

    def leader(self, seed: int) -> int:
        """Which member predicts a turn with this seed."""
        if self.member_selection == "first" or self.members[0].sampling.temperature == 0:
            return 0
        return random.Random(derive_seed("leader", seed)).randrange(len(self.members))

    @property
    def continues(self) -> bool:
        return self.members[0].continues

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None, opening: str = ""
    ) -> Prediction:
        """See ``TextWorldModel.predict``; ``PredictionInvalid`` is of the leading member."""
        leader = self.leader(seed)
        parsed = await self.members[leader].write(start, history, action, seed, session, opening)
        scores = await self._scores(parsed, leader, session)
        whole = [sum(score) for score in scores]
        words = [sum(score[: parsed.status_start]) for score in scores]
        log_p, log_p_observation = log_mean(whole), log_mean(words)
        return replace(
            parsed.prediction,
            confidence=math.exp(log_p),
            outcome_confidence=math.exp(min(0.0, log_p - log_p_observation)) if log_p > -math.inf else 0.0,
            disagreement=disagreement(whole),
        )

    async def _scores(self, parsed: ParsedPrediction, leader: int, session: object) -> list[Sequence[float]]:
        """Log-probs of the tokens under each member, at temperature 1: ``[member][token]``; 0 for a given opening."""
        ids = (*parsed.prompt, *parsed.completion.ids)
        # what was sampled at another temperature has log-probs of that one
        leader_known = self.members[leader].sampling.temperature in (0.0, 1.0)

        async def one(m: int) -> Sequence[float]:
            if m == leader and leader_known:
                return parsed.completion.logprobs
            score = await self._scorers[m].score(ids, len(parsed.prompt) + parsed.begun, session)
            return *[0.0] * parsed.begun, *score

        return list(await asyncio.gather(*(one(m) for m in range(len(self.members)))))

    def release(self, session: object) -> None:
        for member in self.members:
            member.release(session)
