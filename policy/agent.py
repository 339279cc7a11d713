"""A language model as an agent: it reads observations and writes actions, one ``Actor`` per episode."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

from policy.lm.engine import Completion, Engine, Sampling
from policy.lm.render import SUMMARY_REQUEST, ChatFormat, Tokens, append_observation, policy_prompt, spoken_action
from real_envs.seeding import derive_seed
from real_envs.trajectory import Observation, Owner, Trace


class LanguageModelAgent:
    """A causal LM in a chat: observations are the user's turns, actions are the assistant's.

    Args:
        max_action_tokens: an action that does not end by then is ended by force; the forced end token belongs to the
            scaffold and is not trained.
        temperature: 0 plays greedily.
        summary_tokens: the longest summary; with 0 an episode ends where its context is full. Otherwise the policy
            writes one before that, as an answer to ``SUMMARY_REQUEST``, and goes on in a new context: what ``reset``
            showed, the summary, and word for word the last observation, however long. The world sees nothing of it.
            Lu et al. 2025 (SUPO, arXiv 2510.06727) summarise at a limit as well; in Memory as Action (Zhang et al.
            2025, arXiv 2510.12635) the policy chooses when.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        max_action_tokens: int = 16,
        temperature: float = 1.0,
        name: str = "policy",
        summary_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.sampling = Sampling(max_action_tokens, chat.stop, temperature)
        self.summary = Sampling(summary_tokens, chat.stop, temperature) if summary_tokens else None
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
        self._start, self._begins = observation.text, [0]  # of the contexts so far, the last one is read
        self._unread: str | None = None  # the observation that a summary has to make room for
        if observation.history:
            self._check_room(observation.history[-1].observation)

    async def act(self) -> str:
        """Samples the next action, after a thought where the policy writes one (``spoken_action``).

        Raises:
            ContextFull: the episode no longer fits the context.
            EngineFailure: generation broke.
        """
        if self._unread is not None:
            await self._summarise(self._unread)
        chat = self._agent.chat
        completion = await self._write("policy", self._agent.sampling)
        if not completion.stopped:
            self._tokens.append((chat.stop,), Owner.SCAFFOLD)
            self._fill_logprobs()
        self._turn += 1
        return spoken_action(chat.decode(_content(completion)))

    async def _write(self, what: str, sampling: Sampling) -> Completion:
        """Samples what comes next in the context."""
        seed = derive_seed(what, self._seed, self._turn)
        context = self._tokens.ids[self._begins[-1] :]
        completion = await self._agent.engine.complete(context, sampling, seed, self._session)
        self._tokens.append(completion.ids, Owner.AGENT, self._turn)
        self._logprobs.extend(completion.logprobs)
        self._versions.append(completion.version)
        return completion

    async def _summarise(self, unread: str) -> None:
        chat, said, summary = self._agent.chat, Tokens.empty(), self._agent.summary
        assert summary is not None
        append_observation(chat, said, unread)
        self._tokens.cut(len(self._tokens.ids) - len(said.ids))
        del self._logprobs[len(self._tokens.ids) :]
        append_observation(chat, self._tokens, SUMMARY_REQUEST, Owner.SCAFFOLD)
        self._fill_logprobs()
        written = _content(await self._write("summary", summary))
        self._unread = None
        self._begins.append(len(self._tokens.ids))
        prompt = policy_prompt(chat, self._start, (), Owner.SCAFFOLD)
        prompt.append((*written, chat.stop), Owner.SCAFFOLD)
        append_observation(chat, prompt, unread)
        self._tokens.extend(prompt)
        self._fill_logprobs()

    def _check_room(self, observation: str) -> None:
        """After the next action there must be room for a summary, or it is due now, before ``observation``."""
        chat, summary = self._agent.chat, self._agent.summary
        if summary is None:
            return
        request = len(chat.to_user) + len(chat.encode(SUMMARY_REQUEST)) + len(chat.to_assistant)
        needed = self._agent.sampling.max_tokens + 1 + request + summary.max_tokens  # 1: an end by force
        if len(self._tokens.ids) - self._begins[-1] + needed > self._agent.engine.context:
            self._unread = observation

    def _fill_logprobs(self) -> None:
        self._logprobs.extend([None] * (len(self._tokens.ids) - len(self._logprobs)))

    def observe(self, observation: Observation) -> None:
        append_observation(self._agent.chat, self._tokens, observation.text)
        self._fill_logprobs()
        self._check_room(observation.text)

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
            segments=tuple(self._begins[1:]),
        )

    def close(self) -> None:
        self._agent.engine.release(self._session)


def _content(completion: Completion) -> tuple[int, ...]:
    """Without the token that ends it."""
    return completion.ids[:-1] if completion.stopped else completion.ids
