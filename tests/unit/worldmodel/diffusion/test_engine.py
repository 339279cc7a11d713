"""If these fail, canvases are filled in with another model than the trained one, or episodes disturb each other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from policy.lm.engine import Completion, ContextFull, EngineFailure, Sampling
from policy.lm.engines.inprocess.slot_engine import MemoryTooSmall
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.errors import UserError
from real_envs.trajectory import Turn
from tests.support.decoders import make_model, random_rows
from worldmodel.diffusion.engine import CanvasEngine, DiffusionWorldModel, check_trained, mark, mask_of, with_mask
from worldmodel.diffusion.sampling import draft_of
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.world_model import InvalidReason, PredictionInvalid

MASK, STOP, BLOCK = 63, 2, 5
SURE = DiffusionSettings(block=BLOCK, steps=BLOCK, entropy_bound=0.0)


def engine_of(model: Any, settings: DiffusionSettings = SURE, slots: int = 4) -> CanvasEngine:
    return CanvasEngine(model, 64, settings, MASK, EngineSettings(slots=slots))


def by_hand(
    model: Any, prompt: Sequence[int], most: int, stop: int = STOP, edit: float = 0.0
) -> tuple[list[int], list[float]]:
    """The likeliest token of the surest place, one a pass, without any cache: a whole pass over text and canvas.

    Behind an end there are only ends, also while the rest is filled in, as in training.
    """

    def look(text: list[int], canvas: list[int]) -> torch.Tensor:
        ids, n = [*text, *canvas], len(text)
        seen = torch.tensor([[[[k <= q or q >= n for k in range(len(ids))] for q in range(len(ids))]]])
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([ids]), attention_mask=seen, use_cache=False).logits[0, n:]
        logits = logits.float()
        logits[:, MASK] = -math.inf
        return logits

    text, logprobs = list(prompt), []
    canvas = [MASK] * BLOCK
    while True:
        told = [0.0] * BLOCK
        if edit and (page := last_page(text, stop)):
            halves = [look(text, [MASK if k % 2 == half else token for k, token in enumerate(page)]) for half in (0, 1)]
            for k, token in enumerate(page):
                share = halves[k % 2][k].softmax(-1)[token].item()
                if share >= edit:
                    canvas[k], told[k] = token, math.log(share)
        while True:
            end = canvas.index(stop) + 1 if stop in canvas else BLOCK
            canvas[end:] = [stop] * (BLOCK - end)
            if MASK not in canvas[:end]:
                break
            logits = look(text, canvas)
            shares = logits.softmax(-1)
            entropy = torch.special.entr(shares).sum(-1)
            place = min((p for p in range(end) if canvas[p] == MASK), key=lambda p: entropy[p].item())
            canvas[place] = int(shares[place].argmax())
            told[place] = shares[place].max().log().item()
        text += canvas[:end]
        logprobs += told[:end]
        if canvas[end - 1] == stop or len(text) - len(prompt) >= most:
            return text[len(prompt) :][:most], logprobs[:most]
        canvas = [MASK] * BLOCK


def last_page(text: list[int], stop: int) -> list[int]:
    """What followed the last tokens where as many of them as possible stood before; empty where not even three did."""
    for n in (48, 24, 12, 6, 3):
        places = [k for k in range(n, len(text)) if text[k - n : k] == text[-n:]]
        if places:
            page = text[places[-1] :][:BLOCK]
            if stop in page:
                page = page[: page.index(stop)] + [stop] * BLOCK
            return (page + [MASK] * BLOCK)[:BLOCK]
    return []


def test_a_canvas_begins_as_the_last_page_and_what_is_unlikely_there_is_hidden_again() -> None:
    """As a plain loop does it."""
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight *= 12  # sure of something, as trained ones are
    settings = replace(SURE, edit=0.5)
    engine = engine_of(model, settings)
    greedy = Sampling(max_tokens=12, stop=STOP, temperature=0.0)
    mattered = 0
    for seed in range(8):
        (prompt,) = random_rows(1, 7, seed=seed)
        page, _ = by_hand(model, prompt, 10)
        for old in (page, [*page[:2], 9, *page[3:]], [*page[:6], STOP, 5]):
            text = [*prompt, *old, *prompt[-3:]]
            got = asyncio.run(engine.complete(text, greedy, 0))
            ids, logprobs = by_hand(model, text, 12, edit=0.5)
            assert list(got.ids) == ids
            assert got.logprobs == pytest.approx(logprobs, abs=1e-2)
            mattered += ids != by_hand(model, text, 12)[0]
    assert mattered > 2
    with pytest.raises(ValueError, match=r"diffusion\.edit"):
        replace(SURE, edit=0.3)


def test_two_looks_tell_of_each_token_given_its_neighbours() -> None:
    text = [9, 9, 5, 6, 7, 8, 4, 9, 9, 5]
    assert draft_of(text, 1, MASK, STOP) is None
    assert draft_of([9, 5, 6], 4, MASK, STOP) is None  # nothing of it stood there before
    ended = draft_of([9, 9, 5, 6, STOP, 4, 9, 9, 5], 4, MASK, STOP)
    assert ended is not None
    assert ended.draft.tolist() == [6, STOP, STOP, STOP]
    short = draft_of([9, 9, 5, 6, 9, 9, 5], 6, MASK, STOP)
    assert short is not None
    assert short.draft.tolist() == [6, 9, 9, 5, MASK, MASK]
    edit = draft_of(text, 4, MASK, STOP)
    assert edit is not None
    assert edit.draft.tolist() == [6, 7, 8, 4]
    shares = {6: 0.9, 8: 0.4, 7: 0.5, 4: 0.6}  # of each token where it is hidden
    for shown, hidden in (([MASK, 7, MASK, 4], (6, 8)), ([6, MASK, 8, MASK], (7, 4))):
        assert edit.shown.tolist() == shown
        logits = torch.full((2, 10), -math.inf)
        for row, token in enumerate(hidden):
            logits[row, token], logits[row, 0] = math.log(shares[token]), math.log(1 - shares[token])
        done = edit.score(logits)
    assert done
    where, logprobs = edit.likely(0.45)
    assert where.tolist() == [True, True, False, True]
    assert np.exp(logprobs) == pytest.approx([0.9, 0.5, 0.4, 0.6])


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite"])  # the fused pass twice, and the model's own
def test_it_fills_in_what_a_plain_loop_does(name: str) -> None:
    """Prompts of several lengths side by side, answers of several canvases, and second turns from cached text."""
    model = make_model(name)
    engine = engine_of(model)
    prompts = [row[:n] for row, n in zip(random_rows(3, 20, seed=5), (3, 20, 11), strict=True)]
    greedy = Sampling(max_tokens=12, stop=STOP, temperature=0.0)

    async def play() -> None:
        first = await asyncio.gather(*(engine.complete(p, greedy, 0, k) for k, p in enumerate(prompts)))
        longer = [[*p, *c.ids, 9, 8, 7] for p, c in zip(prompts, first, strict=True)]
        fed = engine.counts.fed
        second = await asyncio.gather(*(engine.complete(p, greedy, 0, k) for k, p in enumerate(longer)))
        for prompt, got in zip([*prompts, *longer], [*first, *second], strict=True):
            ids, logprobs = by_hand(model, prompt, 12)
            assert list(got.ids) == ids
            assert got.logprobs == pytest.approx(logprobs, abs=1e-3)
            assert got.stopped == (ids[-1] == STOP)
        assert engine.counts.reused >= sum(map(len, prompts))
        canvases = (engine.counts.fed - fed) / BLOCK
        assert canvases < engine.passes + sum(map(len, longer))  # no text was read again in each pass

    asyncio.run(play())


def test_behind_an_end_there_are_only_ends() -> None:
    """An end that is kept early, before the places in front of it, cuts the canvas for those."""
    model = make_model("llama")
    cut = 0
    for prompt in random_rows(6, 9, seed=8):
        free = asyncio.run(engine_of(model).complete(prompt, Sampling(BLOCK, STOP, 0.0), 0))
        for stop in set(free.ids[:-1]):
            got = asyncio.run(engine_of(model).complete(prompt, Sampling(12, stop, 0.0), 0))
            ids, logprobs = by_hand(model, prompt, 12, stop=stop)
            assert list(got.ids) == ids
            assert got.logprobs == pytest.approx(logprobs, abs=1e-3)
            assert got.stopped == (ids[-1] == stop)
            cut += got.stopped
    assert cut > 4


def test_a_seed_decides_an_answer_whoever_is_beside_it() -> None:
    model = make_model("llama")
    prompts = [row[:n] for row, n in zip(random_rows(6, 12, seed=6), (3, 12, 7, 9, 4, 5), strict=True)]
    warm = Sampling(max_tokens=8, stop=STOP, temperature=1.0)

    async def together(slots: int) -> list[Completion]:
        engine = engine_of(model, slots=slots)
        return list(await asyncio.gather(*(engine.complete(p, warm, k) for k, p in enumerate(prompts))))

    crowd, queue = asyncio.run(together(6)), asyncio.run(together(2))
    alone = [asyncio.run(engine_of(model).complete(p, warm, k)) for k, p in enumerate(prompts)]
    assert [c.ids for c in crowd] == [c.ids for c in queue] == [c.ids for c in alone]
    other = [asyncio.run(engine_of(model).complete(p, warm, 100 + k)) for k, p in enumerate(prompts)]
    assert [c.ids for c in other] != [c.ids for c in alone]


def test_what_cannot_be_filled_in_is_typed_and_disturbs_nobody() -> None:
    model = make_model("llama")
    engine, plain = engine_of(model), Sampling(max_tokens=8, stop=STOP, temperature=0.0)

    async def refused() -> None:
        with pytest.raises(ContextFull, match=r"60 \+ 8 tokens"):
            await engine.complete([5] * 60, plain, 0)
        with pytest.raises(ValueError, match="one token"):
            await engine.complete([], plain, 0)

    asyncio.run(refused())
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = math.nan

    async def broken() -> list[Any]:
        asked = (engine.complete([5, token], plain, 0, token) for token in (6, 40, 7))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    engine.update_weights()
    good, bad, fine = asyncio.run(broken())
    assert isinstance(bad, EngineFailure)
    assert isinstance(good, Completion)
    assert isinstance(fine, Completion)
    assert engine.version == good.version == 1
    again = asyncio.run(engine.complete([5, 9], plain, 0))  # in the slot of the broken one, too
    assert all(map(math.isfinite, again.logprobs))
    with pytest.raises(MemoryTooSmall):
        CanvasEngine(model, 64, SURE, MASK, EngineSettings(memory_gib=1e-6))


class Scripted:
    """An engine that writes one text whatever is asked."""

    context, version, exact, block = 200, 0, False, 24

    def __init__(self, ids: Sequence[int], stopped: bool) -> None:
        self.ids, self.stopped = tuple(ids), stopped

    async def complete(self, ids: Sequence[int], sampling: Sampling, seed: int, session: object = None) -> Completion:
        return Completion(self.ids, tuple(math.log(0.5) for _ in self.ids), self.stopped)


TOKENIZER = train_tokenizer(["Hall. A lamp is here.\n"], 300, ["\n[reward=0]", "\n[reward=1 done]"], mask=True)
CHAT = ChatFormat(TOKENIZER)


def test_a_canvas_is_a_prediction_or_a_typed_failure() -> None:
    text = [*CHAT.encode("Hall."), *CHAT.encode("\n[reward=1 done]"), CHAT.stop]
    model = DiffusionWorldModel(Scripted(text, True), CHAT, "v").at_temperature(1.0)  # type: ignore[arg-type]
    assert isinstance(model, DiffusionWorldModel)
    told = asyncio.run(model.predict("A door.", [], "go", 0))
    assert (told.observation, told.reward, told.terminated) == ("Hall.", 1.0, True)
    assert told.confidence == pytest.approx(0.5 ** len(text))
    assert told.outcome_confidence == pytest.approx(0.25)  # the line is one token here, and so is the end
    for ids, stopped, reason in (
        (text[:-1], False, InvalidReason.UNFINISHED),
        ([*CHAT.encode("Hall."), CHAT.stop], True, InvalidReason.NO_STATUS),
    ):
        broken = DiffusionWorldModel(Scripted(ids, stopped), CHAT, "v")  # type: ignore[arg-type]
        with pytest.raises(PredictionInvalid) as caught:
            asyncio.run(broken.predict("A door.", [Turn("look", "A door.", 0.0, False)], "go", 0))
        assert caught.value.reason == reason
        assert broken.rejected == {reason: 1}


def test_a_checkpoint_of_another_kind_is_refused_in_a_line() -> None:
    model = make_model("llama")
    with pytest.raises(UserError, match=r"models/w: .*next token.*worldmodel\.kind=diffusion"):
        check_trained(model, "models/w", 32)
    mark(model, DiffusionSettings(block=16))
    with pytest.raises(UserError, match=r"block=16, not 32"):
        check_trained(model, "models/w", 32)
    check_trained(model, "models/w", 16)
    plain = train_tokenizer(["Hall."], 300)
    with pytest.raises(UserError, match="no mask token"):
        mask_of(plain)
    with_mask(model, plain)  # a model of 64 rows gets as many as the tokenizer has tokens
    assert mask_of(plain) == len(plain) - 1
    rows = model.get_input_embeddings().weight
    assert len(rows) == len(plain)
    torch.testing.assert_close(rows[-1], rows[:-1].mean(0))
    assert mask_of(TOKENIZER) in TOKENIZER.all_special_ids
    assert CHAT.decode(CHAT.encode("<|mask|>")) == "<|mask|>"  # in a page it is plain text
