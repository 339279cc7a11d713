"""If these fail, guessing ahead changes what models write, or guesses are never used and only cost time."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.drafts import LENGTHS, Draft, Drafts
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.settings import EngineSettings
from tests.support.asking import VOCAB, prompt, together
from tests.support.engines import CONTEXT, MODEL, NEVER, assert_scored, generate, make_model

NO_STOP = -5


def longest_match(sequences: list[list[int]], ids: list[int], n: int) -> list[list[int]]:
    """All that ever followed the last ``n`` ids, by plain search."""
    found = []
    for sequence in sequences:
        for end in range(n, len(sequence)):
            if sequence[end - n : end] == ids[-n:]:
                found.append(sequence[end:])
    return found


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_a_guess_is_what_once_followed_the_longest_match(
    sequences: list[list[int]], ids: list[int], limit: int
) -> None:
    """In the log or earlier in the text itself; it never runs into the next sequence and never beyond the stop."""
    draft = Drafts(sequences).propose(np.array(ids), 3, limit)
    expected = []
    for n in LENGTHS:
        if n < len(ids):
            expected = longest_match([*sequences, ids], ids, n)
            expected = [tail for tail in expected if tail]
            if expected:
                break
    if not expected:
        assert draft is None
        return
    assert draft is not None
    guess = draft.ids.tolist()
    assert 1 <= len(guess) <= limit
    assert 3 not in guess[:-1]
    assert any(tail[: len(guess)] == guess for tail in expected)


def test_the_last_time_it_happened_counts() -> None:
    """Worlds change: the lamp that was there is gone. And the length learns from what became of earlier guesses."""
    turn = list(range(10, 20))
    drafts = Drafts([[*turn, 1, 1, 1], [*turn, 2, 2, 2, 2, 2, 2]])
    draft = drafts.propose(np.array(turn[:-1] + turn[-1:]), NO_STOP, 99)
    assert draft is not None
    assert draft.ids.tolist() == [2] * 6
    for _ in range(200):
        drafts.observe(Draft(np.array([2, 2, 2, 2]), draft.match), 0)
    short = drafts.propose(np.array(turn), NO_STOP, 99)
    assert short is not None
    assert len(short.ids) == 2


def corpus(wrong: float, temperature: float, n: int = 6) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Prompts and what the model writes after them, with a part of the tokens replaced."""
    prompts = [prompt(12, seed=k) for k in range(n)]
    engine = InProcessEngine(MODEL, CONTEXT)
    written = together(*(engine.complete(p, Sampling(40, NEVER, temperature), seed=k) for k, p in enumerate(prompts)))
    chance = np.random.default_rng(0)
    log = []
    for p, completion in zip(prompts, written, strict=True):
        ids = np.array(completion.ids)
        swapped = chance.random(len(ids)) < wrong
        ids[swapped] = chance.integers(5, VOCAB, swapped.sum())
        log.append([*p, *ids.tolist()])
    return log, prompts, [len(c.ids) for c in written]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [0.0, 0.1, 1.0])
def test_drafts_change_no_token(temperature: float, wrong: float) -> None:
    """Right, partly wrong and useless guesses, greedy and sampled, over two turns, ended by length or by a stop token
    in the middle of a guess: ids are those without guesses, and log-probs are the model's. Right guesses save steps."""
    log, prompts, _ = corpus(wrong, temperature)
    plain, guided = InProcessEngine(MODEL, CONTEXT), InProcessEngine(MODEL, CONTEXT, drafts=Drafts(log))
    texts = {}
    for engine in (plain, guided):
        histories = [list(p) for p in prompts]
        written = []
        for turn in range(2):
            stops = [log[k][20] if k % 2 else NEVER for k in range(len(prompts))]
            got = together(
                *(
                    engine.complete(h, Sampling(40, stops[k], temperature), seed=k, session=k)
                    for k, h in enumerate(histories)
                )
            )
            for h, completion, stop in zip(histories, got, stops, strict=True):
                assert_scored(MODEL, h, completion, temperature or 1.0)
                assert completion.stopped == (completion.ids[-1] == stop)
                h += [*completion.ids, *prompt(3, seed=turn)]
            written.append([c.ids for c in got])
        texts[engine] = written
    assert texts[plain] == texts[guided]
    if wrong == 0:
        assert guided.drafts is not None
        assert guided.counts.steps < plain.counts.steps / 2 + 40  # the second turn cannot be guessed
        assert guided.counts.accepted > 40


def test_the_distribution_with_drafts_is_the_models() -> None:
    """Pearson's chi-square of pairs of tokens over 4000 seeds, with the same guess for all of them:
    accepted or not, pairs are as likely as the model says. Fixed seeds: the test has no chance of its own."""
    model, n, temperature = make_model(std=0.1), 4000, 0.8
    ids = prompt(8, seed=2)
    guess = list(generate(model, ids, 3, NEVER))
    engine = InProcessEngine(
        model, CONTEXT, EngineSettings(slots=1000, memory_gib=4.0), drafts=Drafts([[*ids, *guess]])
    )
    got = together(*(engine.complete(ids, Sampling(2, NEVER, temperature), seed) for seed in range(n)))
    assert engine.drafts is not None
    assert 0.05 < engine.counts.accepted / engine.counts.drafted < 0.95
    pairs = Counter(c.ids for c in got)
    with torch.no_grad():
        first = (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)
        contexts = torch.tensor([[*ids, token] for token in range(VOCAB)])
        second = (model(contexts).logits[:, -1].double() / temperature).softmax(-1)
    joint = (first[:, None] * second).flatten()
    common = [k for k in range(len(joint)) if n * joint[k] >= 5]
    observed = [pairs[(k // VOCAB, k % VOCAB)] for k in common]
    expected = [n * float(joint[k]) for k in common]
    observed.append(n - sum(observed))
    expected.append(n - sum(expected))
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert len(common) >= 20
    assert abs(chi_square - len(common)) < 4 * math.sqrt(2 * len(common))
