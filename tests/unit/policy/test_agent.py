"""If these fail, the policy is trained on tokens it did not sample, or reads what only the simulator may know.

The engine is a script of token ids, so that every trace can be written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

import pytest

from policy.agent import LanguageModelAgent
from policy.lm.engine import Completion, Sampling
from policy.lm.render import SUMMARY_REQUEST, ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Observation, Owner, Trace, Turn

S, A, E = Owner.SCAFFOLD, Owner.AGENT, Owner.ENV
TOKENIZER = train_tokenizer(["lamp"] * 9, 300, phrases=["ATTIC", "HALL", "go east", "take", "xyzzy"])
CHAT = ChatFormat(TOKENIZER)
END = CHAT.stop


def ids(*texts: str) -> list[int]:
    return [token for text in texts for token in TOKENIZER.encode(text, add_special_tokens=False)]


class ScriptedEngine:
    """Gives its completions one after the other, each token with the log-prob -1, -2, ...; notes what it is asked."""

    context = 1000

    def __init__(self, *script: Sequence[int]) -> None:
        self.script = list(script)
        self.asked: list[tuple[list[int], Sampling, int, Hashable | None]] = []
        self.released: list[Hashable] = []

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        self.asked.append((list(ids), sampling, seed, session))
        written = tuple(self.script.pop(0))
        return Completion(written, tuple(-1.0 - i for i in range(len(written))), written[-1] == sampling.stop)

    def release(self, session: Hashable) -> None:
        self.released.append(session)


def play(
    engine: ScriptedEngine, observations: Sequence[Observation], seed: int = 0, agent: LanguageModelAgent | None = None
) -> tuple[list[str], Trace]:
    """The actions of one episode that sees ``observations`` (the first from ``reset``), and its trace."""
    agent = agent or LanguageModelAgent(engine, CHAT, max_action_tokens=4, temperature=0.8)
    first, *rest = observations

    async def run() -> tuple[list[str], Trace]:
        actor = agent.start(first, seed)
        actions = [await actor.act()]
        for observation in rest:
            actor.observe(observation)
            actions.append(await actor.act())
        trace = actor.trace()
        actor.close()
        return actions, trace

    return asyncio.run(run())


def test_an_episode_by_hand() -> None:
    """Two turns: the agent owns exactly what was sampled, the end token included, and the world owns its words."""
    engine = ScriptedEngine([*ids("go east"), END], [*ids("take", "lamp"), END])
    actions, trace = play(engine, [Observation("ATTIC"), Observation("HALL")])
    assert actions == ["go east", "takelamp"]
    assert list(trace.ids) == ids(
        "<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "go east", "<|end|>",
        "<|user|>", "HALL", "<|end|>", "<|assistant|>", "take", "lamp", "<|end|>",
    )  # fmt: skip
    assert trace.owners == (S, E, S, S, A, A, S, E, S, S, A, A, A)
    assert trace.turns == (-1, -1, -1, -1, 0, 0, -1, -1, -1, -1, 1, 1, 1)
    none = (None,) * 4
    assert trace.logprobs == (*none, -1.0, -2.0, *none, -1.0, -2.0, -3.0)
    assert trace.temperature == 0.8


def test_an_episode_in_two_contexts_by_hand() -> None:
    """There is room for two turns and a summary after the first, not after the second: the policy is asked for one
    before it reads HALL, and goes on with the task, the summary and HALL. It owns the summary where it wrote it, as an
    action of its next turn, and not where it is repeated."""
    engine = ScriptedEngine([*ids("go east"), END], [*ids("lamp"), END], [*ids("take"), END])
    request = ids(SUMMARY_REQUEST)
    first = ids("<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "go east", "<|end|>")
    asking = [*ids("<|user|>"), *request, *ids("<|end|>", "<|assistant|>")]
    second = ids("<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "lamp", "<|end|>")
    said = ids("<|user|>", "HALL", "<|end|>", "<|assistant|>")
    engine.context = len(first) + len(said) + 4 + 1 + len(asking) + 6 - 1  # a token too few
    agent = LanguageModelAgent(engine, CHAT, max_action_tokens=4, temperature=0.8, summary_tokens=6)
    actions, trace = play(engine, [Observation("ATTIC"), Observation("HALL")], agent=agent)
    assert actions == ["go east", "take"]
    lamp, take = [*ids("lamp"), END], [*ids("take"), END]
    assert list(trace.ids) == [*first, *asking, *lamp, *second, *said, *take]
    assert trace.owners == (
        *(S, E, S, S, A, A), *(S,) * len(asking), *(A,) * 2,
        *(S, E, S, S, S, S), *(S, E, S, S), *(A,) * 2,
    )  # fmt: skip
    assert [turn for turn in trace.turns if turn >= 0] == [0, 0, 1, 1, 1, 1]
    assert trace.segments == (len(first) + len(asking) + 2,)
    assert [asked[0] for asked in engine.asked] == [first[:4], [*first, *asking], [*second, *said]]
    assert [asked[1].max_tokens for asked in engine.asked] == [4, 6, 4]
    assert len(trace.versions) == 3
    engine.script, engine.context = [[*ids("go east"), END], take], engine.context + 1
    assert play(engine, [Observation("ATTIC"), Observation("HALL")], agent=agent)[1].segments == ()


def test_text_that_does_not_retokenise_to_itself_keeps_its_sampled_ids() -> None:
    """The policy spelled "lamp" letter by letter, but its tokeniser would write it in one token. Re-encoded, the
    log-probs would belong to other tokens, and the next prompt would be a history that was never sampled."""
    spelled = [token for letter in "lamp" for token in ids(letter)]
    assert len(spelled) == 4
    assert len(ids("lamp")) == 1
    engine = ScriptedEngine([*spelled[:3], END], [*ids("lamp"), END])
    actions, trace = play(engine, [Observation("ATTIC"), Observation("HALL")])
    assert actions == ["lam", "lamp"]
    assert list(trace.ids[4:8]) == [*spelled[:3], END]
    second_prompt = engine.asked[1][0]
    assert list(trace.ids[: len(second_prompt)]) == second_prompt
    assert second_prompt[4:8] == [*spelled[:3], END]
    broken = ids("é")  # two bytes, of which the first alone is no character
    engine = ScriptedEngine([broken[0], END], [END])
    actions, trace = play(engine, [Observation("ATTIC"), Observation("HALL")])
    assert actions == ["\ufffd", ""]
    assert trace.ids[4] == broken[0]


def test_an_end_token_that_the_loop_forced_is_scaffold() -> None:
    """The policy did not choose to stop; trained on that token it would learn an end that it never sampled."""
    words = ids("take", "lamp", "take", "lamp")
    actions, trace = play(ScriptedEngine(words, [END]), [Observation("ATTIC"), Observation("HALL")])
    assert actions == ["takelamptakelamp", ""]
    assert list(trace.ids[4:9]) == [*words, END]
    assert trace.owners[4:9] == (A, A, A, A, S)
    assert trace.logprobs[4:9] == (-1.0, -2.0, -3.0, -4.0, None)
    assert trace.turns[4:9] == (0, 0, 0, 0, -1)
    assert trace.owners[-1:] == (A,)  # an empty action is a choice: its sampled end is the agent's
    assert (trace.ids[-1], trace.turns[-1]) == (END, 1)


def test_an_end_token_in_the_middle_of_the_limit_is_not_forced_twice() -> None:
    _, trace = play(ScriptedEngine([*ids("take", "lamp", "go east"), END]), [Observation("ATTIC")])
    assert trace.ids.count(END) == 2  # the user's and the agent's own, which came as the last token allowed
    assert trace.owners[-1] == A


def test_nothing_privileged_reaches_the_tokens() -> None:
    """Admissible commands or a plan in the prompt would make the benchmark meaningless. Not only is the secret word
    absent: the episode is, token for token, the one of a world that has no secret."""
    secret = {"plan": ["xyzzy"], "admissible_commands": ["xyzzy", "take"], "inventory": "xyzzy"}
    past = (Turn("go east", "HALL", 0.0, False, {"hint": "xyzzy"}),)
    with_secret = [Observation("ATTIC", secret, past), Observation("HALL", secret), Observation("HALL", secret)]
    without = [Observation("ATTIC", history=past), Observation("HALL"), Observation("HALL")]
    script = [[*ids("take"), END]] * 3
    told, untold = ScriptedEngine(*script), ScriptedEngine(*script)
    _, trace = play(told, with_secret)
    assert trace == play(untold, without)[1]
    assert "xyzzy" not in TOKENIZER.decode(trace.ids)
    assert [asked[0] for asked in told.asked] == [asked[0] for asked in untold.asked]


def test_the_history_of_a_branched_start_is_context() -> None:
    """Its actions were somebody else's: no log-probs, no training. The policy's own turns count on from there."""
    past = (Turn("go east", "HALL", 0.5, False), Turn("take", "ATTIC", 0.0, False))
    _, trace = play(ScriptedEngine([*ids("lamp"), END]), [Observation("ATTIC", history=past)])
    assert list(trace.ids) == ids(
        "<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "go east", "<|end|>",
        "<|user|>", "HALL", "<|end|>", "<|assistant|>", "take", "<|end|>",
        "<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "lamp", "<|end|>",
    )  # fmt: skip
    assert trace.owners == (S, E, S, S, S, S, S, E, S, S, S, S, S, E, S, S, A, A)
    assert trace.turns == (*(-1,) * 16, 2, 2)
    assert set(trace.logprobs[:16]) == {None}


@pytest.mark.parametrize("seeds", [(0, 1), (3, 4)])
def test_every_turn_and_every_episode_has_its_own_seed(seeds: tuple[int, int]) -> None:
    """With one seed for all turns a policy would repeat its luck; across episodes a group would hold one episode."""
    agent_seeds = []
    for seed in (*seeds, seeds[0]):
        engine = ScriptedEngine([END], [END], [END])
        play(engine, [Observation("ATTIC"), Observation("HALL"), Observation("HALL")], seed)
        agent_seeds.append([asked[2] for asked in engine.asked])
    assert len({*agent_seeds[0], *agent_seeds[1]}) == 6
    assert agent_seeds[2] == agent_seeds[0]
    # a branched start goes on with the seeds of its turn, not with those of the first
    engine = ScriptedEngine([END])
    play(engine, [Observation("ATTIC", history=(Turn("take", "HALL", 0.0, False),))], seeds[0])
    assert engine.asked[0][2] == agent_seeds[0][1]


def test_episodes_have_sessions_of_their_own_and_free_them() -> None:
    """Two episodes under one key would throw away each other's cache at every turn; an unfreed one fills the memory."""
    engine = ScriptedEngine([END], [END], [END], [END])
    agent = LanguageModelAgent(engine, CHAT)
    other = LanguageModelAgent(engine, CHAT)
    play(engine, [Observation("ATTIC"), Observation("HALL")], agent=agent)
    play(engine, [Observation("ATTIC")], agent=agent)
    play(engine, [Observation("ATTIC")], agent=other)
    sessions = [asked[3] for asked in engine.asked]
    assert sessions[0] == sessions[1]
    assert len(set(sessions)) == 3
    assert engine.released == [sessions[0], sessions[2], sessions[3]]


def test_the_engine_is_asked_as_the_agent_was_told() -> None:
    engine = ScriptedEngine([END])
    play(engine, [Observation("ATTIC")])
    assert engine.asked[0][1] == Sampling(max_tokens=4, stop=END, temperature=0.8)
    agent = LanguageModelAgent(ScriptedEngine([END]), CHAT, 4, temperature=0.7)
    _, trace = play(agent.engine, [Observation("ATTIC")], agent=agent)
    assert trace.temperature == 0.7  # whoever trains on it can tell


def test_a_thought_is_the_policys_own_and_the_world_gets_the_action_alone() -> None:
    """All that was sampled is trained; what stands before the line [action] is not sent to the world."""
    thought = ids("HALL", "\n[action]\n", "take")
    engine = ScriptedEngine([*thought, END], [*ids("take"), END])
    agent = LanguageModelAgent(engine, CHAT, max_action_tokens=40)
    actions, trace = play(engine, [Observation("ATTIC"), Observation("HALL")], agent=agent)
    assert actions == ["take", "take"]
    own = [token for token, owner in zip(trace.ids, trace.owners, strict=True) if owner == A]
    assert own == [*thought, END, *ids("take"), END]
    assert engine.asked[1][0][: len(trace.ids) - 2] == list(trace.ids)[:-2]  # and it remembers what it thought
