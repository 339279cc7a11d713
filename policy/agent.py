"""A language model as an agent: it reads observations and writes actions, one ``Actor`` per episode."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

from policy.lm.engine import Completion, Engine, Sampling
from policy.lm.render import ChatFormat, append_observation, policy_prompt, spoken_action
from real_envs.seeding import derive_seed
from real_envs.trajectory import Observation, Owner, Trace


class LanguageModelAgent:
    """A causal LM in a chat: observations are the user's turns, actions are the assistant's.

    Args:
        max_action_tokens: an action that does not end by then is ended by force; the forced end token belongs to the
            scaffold and is not trained.
        temperature: 0 plays greedily.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        max_action_tokens: int = 16,
        temperature: float = 1.0,
        name: str = "policy",
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.sampling = Sampling(max_action_tokens, chat.stop, temperature)
        self.name = name
        self._episodes = count()

    def start(self, observation: Observation, seed: int) -> LanguageModelActor:
        return LanguageModelActor(self, observation, seed, session=(id(self), next(self._episodes)))


class LanguageModelActor:
    """Keeps the growing token sequence of one episode; see ``LanguageModelAgent``."""

    def __init__(self, agent: LanguageModelAgent, observation: Observation, seed: int, session: Hashable) -> None:
        self._agent = agent
        self._seed = seed
        self._session = session
        # Only ``text`` and ``history`` are read: nothing privileged can reach a token.
        self._tokens = policy_prompt(agent.chat, observation.text, observation.history, Owner.SCAFFOLD)
        self._logprobs: list[float | None] = [None] * len(self._tokens.ids)
        self._versions: list[int] = []
        self._turn = len(observation.history)

    async def act(self) -> str:
        """Samples the next action, after a thought where the policy writes one (``spoken_action``).

        Raises:
            ContextFull: the episode no longer fits the context.
            EngineFailure: generation broke.
        """
        agent = self._agent
        seed = derive_seed("policy", self._seed, self._turn)
        completion = await agent.engine.complete(self._tokens.ids, agent.sampling, seed, self._session)
        self._append(completion)
        content = completion.ids[:-1] if completion.stopped else completion.ids
        return spoken_action(agent.chat.decode(content))

    def _append(self, completion: Completion) -> None:
        self._tokens.append(completion.ids, Owner.AGENT, self._turn)
        self._logprobs.extend(completion.logprobs)
        self._versions.append(completion.version)
        if not completion.stopped:
            self._tokens.append((self._agent.chat.stop,), Owner.SCAFFOLD)
            self._logprobs.append(None)
        self._turn += 1

    def observe(self, observation: Observation) -> None:
        append_observation(self._agent.chat, self._tokens, observation.text)
        self._logprobs.extend([None] * (len(self._tokens.ids) - len(self._logprobs)))

    def trace(self) -> Trace:
        return Trace(
            ids=tuple(self._tokens.ids),
            owners=tuple(self._tokens.owners),
            logprobs=tuple(self._logprobs),
            turns=tuple(
                turn if owner == Owner.AGENT else -1
                for turn, owner in zip(self._tokens.turns, self._tokens.owners, strict=True)
            ),
            temperature=self._agent.sampling.temperature,
            versions=tuple(self._versions),
        )

    def close(self) -> None:
        self._agent.engine.release(self._session)
