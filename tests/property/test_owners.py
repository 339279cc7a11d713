"""If these fail, a model is trained on words that are not its own: the policy on what the world said, or the reverse.

In these episodes the agent writes lower-case letters only and the world capitals only, so that every token shows whose
it is, whatever its recorded owner says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.data.examples import imitation_row
from imagination.learning.experience import policy_row
from imagination.rollout.play import Episode, Provenance, play
from policy.agent import LanguageModelAgent
from policy.lm.batch import Row, collate
from policy.lm.engine import Completion, Sampling
from policy.lm.render import ChatFormat, Tokens, render_for_policy
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trajectory, Turn
from worldmodel.formats.full import FullObservation, episode_tokens, status_line
from worldmodel.objective import world_model_row

quick = settings(max_examples=40)
OUTCOMES = [(reward, end) for reward in (None, 0.0, 1.0, 0.25) for end in (False, True)]
TOKENIZER = train_tokenizer(
    ["ABBA CD. AB AB CD", "abba cd ab ab"] * 3, 300, sorted({status_line(*outcome) for outcome in OUTCOMES})
)
CHAT = ChatFormat(TOKENIZER)
END = CHAT.stop
LIMIT = 5  # tokens of an action


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


# --- played episodes: the agent samples letters one by one, or in the tokeniser's own pieces ---

spoken = st.text("ABCD .", max_size=8)
said = st.text("abcd", max_size=LIMIT - 1)
logged = st.lists(st.builds(Turn, said, spoken, st.sampled_from([None, 0.0, 0.5]), st.just(False)), max_size=3)


@dataclass(frozen=True)
class Script:
    """What happens in an episode: per turn the sampled ids, the answer and its reward; then how it ends."""

    start: str
    history: tuple[Turn, ...]
    completions: list[list[int]]
    answers: list[tuple[str, float | None]]
    ending: StopReason


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    completions, answers = [], []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(said)
        pieces = [i for letter in text for i in encode(letter)] if draw(st.booleans()) else encode(text)
        forced = draw(st.booleans())
        completions.append((pieces + encode("d") * LIMIT)[:LIMIT] if forced else [*pieces, END])
        answers.append((draw(spoken), draw(st.sampled_from([None, 0.0, 1.0, 0.25]))))
    return Script(draw(spoken), tuple(draw(logged)), completions, answers, draw(st.sampled_from(StopReason)))


@dataclass
class Scripted:
    """Engine and environment of a script."""

    script: Script
    context: int = 1000
    said: int = 0
    heard: int = 0

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        ids = tuple(self.script.completions[self.said])
        self.said += 1
        return Completion(ids, tuple(-0.5 for _ in ids), ids[-1] == END)

    def release(self, session: Hashable) -> None: ...

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(self.script.start, {"secret": "zzz"}, self.script.history)

    async def step(self, action: str) -> StepResult:
        text, reward = self.script.answers[self.heard]
        self.heard += 1
        ending = self.script.ending if self.heard == len(self.script.answers) else None
        if ending is not None and ending.is_failure:
            raise EnvFailure(ending, "broken")
        end = ending is StopReason.TERMINATED
        cut = ending is not None and ending.is_truncation
        return StepResult(Observation(text), reward, end, cut, stop=ending if cut else None)

    async def close(self) -> None: ...


def played(script: Script) -> Trajectory:
    world = Scripted(script)
    agent = LanguageModelAgent(world, CHAT, max_action_tokens=LIMIT)
    return asyncio.run(play(world, agent, Episode("e", Task("t"), "g", 0), Provenance(Source.REAL), 10))


def expected_tokens(script: Script, turns: int) -> list[tuple[int, Owner]]:
    """The whole conversation as a plain loop: template and history are scaffold, sampled ids the agent's, observations
    the world's. ``turns`` answers were seen."""
    s, a, e = Owner.SCAFFOLD, Owner.AGENT, Owner.ENV
    user, assistant = encode("<|user|>"), encode("<|assistant|>")
    found = [(user, s), (encode(script.start), e), ([END], s), (assistant, s)]
    for turn in script.history:
        found += [(encode(turn.action), s), ([END], s)]
        found += [(user, s), (encode(turn.observation), e), ([END], s), (assistant, s)]
    for k, ids in enumerate(script.completions):
        found.append((ids, a))
        if ids[-1] != END:
            found.append(([END], s))
        if k < turns:
            found += [(user, s), (encode(script.answers[k][0]), e), ([END], s), (assistant, s)]
    return [(token, owner) for ids, owner in found for token in ids]


@quick
@given(scripts())
def test_every_token_of_a_rollout_is_its_makers(script: Script) -> None:
    """The owners cover the sequence, one each, and none is guessed from text: also where the agent spells words in a
    way that the tokeniser would not, or is cut off before its end token."""
    episode = played(script)
    assert episode.trace is not None
    unseen = 0 if script.ending.is_truncation and script.ending is not StopReason.CONTEXT_LIMIT else 1
    tokens = expected_tokens(script, len(script.answers) - unseen)
    assert list(zip(episode.trace.ids, episode.trace.owners, strict=True)) == tokens
    for owner, logprob in zip(episode.trace.owners, episode.trace.logprobs, strict=True):
        assert (logprob == -0.5) == (owner == Owner.AGENT)


@quick
@given(scripts())
def test_rl_trains_exactly_what_the_policy_sampled(script: Script) -> None:
    """Its ids in its order, with their log-probs, and all it earned on them; of what the machinery broke nothing, and
    not the action that a full context left without an answer."""
    episode = played(script)
    row = policy_row(episode)
    counted = script.completions[: -1 if script.ending is StopReason.CONTEXT_LIMIT else None]
    if script.ending.is_outage or not counted:
        assert row is None
        return
    assert row is not None
    sampled = [token for ids in counted for token in ids]
    batch = collate([row], pad=0)
    chosen = batch.rl_weight[0] != 0
    assert batch.ids[0][chosen].tolist() == sampled
    assert batch.action_mask[0].tolist() == chosen.tolist()
    assert batch.behavior_logprobs[0][chosen].tolist() == [-0.5] * len(sampled)
    assert batch.behavior_logprobs[0][~chosen].isnan().all()
    assert not batch.ce_weight.any()
    assert set(batch.turns[0][chosen].tolist()) >= set(batch.rewards[0].nonzero()[:, 0].tolist())
    assert math.isclose(float(batch.rewards.sum()), sum(turn.reward or 0.0 for turn in episode.own_turns))
    # a limit of ours leaves a state to bootstrap from; what the guard refused, or broke the dream, is none
    assert row.truncated == (script.ending in (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT))


# --- logged episodes ---

logged_turns = st.builds(lambda a, o, outcome: Turn(a, o, *outcome), said, spoken, st.sampled_from(OUTCOMES))
episodes = st.builds(
    lambda start, turns: Trajectory("e", "t", "g", Source.REAL, "a", 0, start, tuple(turns), StopReason.TURN_LIMIT),
    spoken,
    st.lists(logged_turns, min_size=1, max_size=4),
)


def of_owner(tokens: Tokens, owner: Owner) -> list[int]:
    return [token for token, mine in zip(tokens.ids, tokens.owners, strict=True) if mine == owner]


def trained(row: Row) -> list[int]:
    """Ids with a weight in any loss."""
    mask = collate([row], pad=0).trained_mask[0].tolist()
    return [token for token, mine in zip(row.ids.tolist(), mask, strict=True) if mine]


@quick
@given(episodes)
def test_owners_cover_both_views_and_are_right(episode: Trajectory) -> None:
    """Agent, world and scaffold are three disjoint parts of a sequence, and each holds what its name says. In the world
    model's view the start is scaffold: nobody can predict it."""
    for tokens in (render_for_policy(CHAT, episode), episode_tokens(CHAT, episode, FullObservation())):
        assert len(tokens.ids) == len(tokens.owners) == len(tokens.turns)
        assert sum(len(of_owner(tokens, owner)) for owner in Owner) == len(tokens.ids)
        assert not any(c.isupper() for c in CHAT.decode(of_owner(tokens, Owner.AGENT)))
        for k, turn in enumerate(episode.turns):
            own = [
                token
                for token, owner, at in zip(tokens.ids, tokens.owners, tokens.turns, strict=True)
                if (owner, at) == (Owner.AGENT, k)
            ]
            assert CHAT.decode(own) == turn.action
    of_policy, of_world = render_for_policy(CHAT, episode), episode_tokens(CHAT, episode, FullObservation())
    answered = "".join(turn.observation + status_line(turn.reward, turn.terminated) for turn in episode.turns)
    assert CHAT.decode(of_owner(of_world, Owner.ENV)) == answered
    assert CHAT.decode(of_owner(of_world, Owner.SCAFFOLD)) == episode.start + "\n> "
    seen = episode.start + "".join(turn.observation for turn in episode.turns[:-1])
    assert CHAT.decode(of_owner(of_policy, Owner.ENV)) == seen
    assert CHAT.decode(of_owner(of_policy, Owner.SCAFFOLD)) == ""  # template only


@quick
@given(episodes, st.data())
def test_policy_and_world_model_never_train_on_the_same_words(episode: Trajectory, data: st.DataObject) -> None:
    """One log trains both models, each on its half: the actions with their ends, the answers with status and end.
    Together these are all that was done and said after the start."""
    weights = data.draw(st.lists(st.floats(0.1, 3), min_size=len(episode.turns), max_size=len(episode.turns)))
    cloned, dreamed = imitation_row(CHAT, episode), world_model_row(CHAT, episode, weights)
    assert TOKENIZER.decode(trained(cloned)) == "".join(turn.action + "<|end|>" for turn in episode.turns)
    assert TOKENIZER.decode(trained(dreamed)) == "".join(
        turn.observation + status_line(turn.reward, turn.terminated) + "<|end|>" for turn in episode.turns
    )
    assert not any(c.isupper() for c in CHAT.decode(trained(cloned)))
    # neither row invents what only a rollout has: log-probs, advantages, rewards
    for row in (cloned, dreamed):
        batch = collate([row], pad=0)
        assert batch.behavior_logprobs.isnan().all()
        assert not batch.rl_weight.any()
        assert not batch.advantages.any()
        assert not batch.rewards.any()
        assert batch.action_mask.tolist() == (batch.ce_weight != 0).tolist()


@quick
@given(episodes, st.data())
def test_a_turn_of_the_world_has_its_own_weight(episode: Trajectory, data: st.DataObject) -> None:
    """Shifted by a turn, the frequent answer would get the weight of the rare one."""
    n = len(episode.turns)
    weights = data.draw(st.lists(st.floats(0.125, 3, width=32), min_size=n, max_size=n, unique=True))
    row = world_model_row(CHAT, episode, weights)
    for turn, weight in zip(episode.turns, weights, strict=True):
        own = row.ids[row.ce_weight == weight].tolist()
        assert TOKENIZER.decode(own) == turn.observation + status_line(turn.reward, turn.terminated) + "<|end|>"


@quick
@given(episodes, st.sampled_from([0.25, 2.0]), st.sampled_from([0.0, 1.0]))
def test_a_policy_that_also_learns_the_world_learns_observations_and_nothing_else(
    episode: Trajectory, weight: float, actions: float
) -> None:
    """Implicit world modelling: what was seen after each action has the weight of observations, the last one too. The
    start, the template and what only a world model may read have none. Switched off, not a token differs."""
    turns = tuple(replace(turn, info={"plan": "DD"}) for turn in episode.turns)
    known = replace(episode, world_facts=("ABBA CD",), turns=turns)
    off, plain = imitation_row(CHAT, known, observations=0.0), imitation_row(CHAT, episode)
    assert (off.ids.tolist(), off.ce_weight.tolist()) == (plain.ids.tolist(), plain.ce_weight.tolist())
    assert off.action_mask.tolist() == plain.action_mask.tolist()
    row = imitation_row(CHAT, known, actions=actions, observations=weight)
    seen = row.ids[row.ce_weight == weight].tolist()
    assert seen == [token for turn in episode.turns for token in encode(turn.observation)]
    acted = row.ids[row.action_mask].tolist()
    assert acted == [token for turn in episode.turns for token in [*encode(turn.action), END]]
    assert (row.ce_weight[row.action_mask] == actions).all()
    assert int((row.ce_weight != 0).sum()) == len(seen) + len(acted) * (actions > 0)
