"""If these fail, dreams by diffusion are drawn from another distribution than the model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worldmodel.diffusion.objective import without_mask
from worldmodel.diffusion.sampling import Sampler, make_sampler
from worldmodel.diffusion.settings import DiffusionSettings

HIDDEN = 0  # the mask, in a vocabulary of this and three tokens
DRAWS = 400


def planted(seed: int = 0) -> Tensor:
    """``[4, 4, 4]``: a joint distribution of three tokens that depend on one another; the mask has no probability."""
    table = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(seed)) ** 4
    for dim in range(3):
        table.index_fill_(dim, torch.tensor([HIDDEN]), 0.0)
    return table / table.sum()


def conditionals(table: Tensor, canvas: list[int]) -> Tensor:
    """Logits ``[hidden, 4]``: what a perfect model says of each hidden place, given the others that are known."""
    for dim, token in enumerate(canvas):
        if token != HIDDEN:
            table = table.index_select(dim, torch.tensor([token]))
    places = [p for p, token in enumerate(canvas) if token == HIDDEN]
    return torch.stack([(table.sum([d for d in range(3) if d != p]) / table.sum()).log() for p in places])


def draw(sampler: Sampler, table: Tensor, temperature: float, generator: torch.Generator) -> tuple[list[int], float]:
    """A canvas of three and the log-probability with which it was filled in."""
    canvas, total = [HIDDEN] * 3, 0.0
    for step in range(3):
        places = [p for p, token in enumerate(canvas) if token == HIDDEN]
        if places:
            kept = sampler(conditionals(table, canvas), temperature, step, generator)
            for p, now, token, logprob in zip(places, kept.where, kept.tokens, kept.logprobs, strict=True):
                if now:
                    canvas[p] = int(token)
                    total += float(logprob)
    return canvas, total


def test_one_unsure_place_a_pass_samples_the_joint_distribution() -> None:
    """Every cell of the table within five standard errors, and the reported probability is that of the cell."""
    table, sampler = planted(), make_sampler(DiffusionSettings(entropy_bound=0.0))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros_like(table)
    for _ in range(DRAWS):
        canvas, logprob = draw(sampler, table, 1.0, generator)
        counts[tuple(canvas)] += 1
        assert logprob == pytest.approx(table[tuple(canvas)].log().item(), abs=1e-4)
    error = (table * (1 - table) / DRAWS).sqrt()
    assert ((counts / DRAWS - table).abs() <= 5 * error + 1e-9).all()
    independent = torch.einsum("i,j,k->ijk", table.sum((1, 2)), table.sum((0, 2)), table.sum((0, 1)))
    assert ((counts / DRAWS - independent).abs() > 5 * error).any()  # the tokens do depend on one another


def test_all_places_in_one_pass_have_the_right_marginals_and_know_nothing_of_each_other() -> None:
    table, sampler = planted(), make_sampler(DiffusionSettings(entropy_bound=100.0))
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros_like(table)
    for _ in range(DRAWS):
        kept = sampler(conditionals(table, [HIDDEN] * 3), 1.0, 0, generator)
        assert kept.where.all()
        counts[tuple(kept.tokens.tolist())] += 1
    shares = counts / counts.sum()
    for dims in ((1, 2), (0, 2), (0, 1)):
        right = table.sum(dims)
        assert ((shares.sum(dims) - right).abs() <= 5 * (right * (1 - right) / DRAWS).sqrt() + 1e-9).all()


def test_the_bound_decides_how_many_places_a_pass_fills() -> None:
    """Entropies by hand: 0.01, 0.3, 0.5, 0.6; the running sums without the largest are 0, 0.01, 0.31, 0.81."""
    entropies = [0.6, 0.01, 0.5, 0.3]

    def coin(entropy: float) -> float:
        low, high = 1e-9, 0.5
        for _ in range(60):
            p = (low + high) / 2
            h = -(p * torch.log(torch.tensor(p)) + (1 - p) * torch.log(torch.tensor(1 - p))).item()
            low, high = (p, high) if h < entropy else (low, p)
        return low

    logits = torch.tensor([[p, 1 - p] for p in map(coin, entropies)], dtype=torch.float64).log().float()
    for bound, places in ((0.0, [1]), (0.02, [1, 3]), (0.4, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        for temperature in (0.0, 1.0):
            kept = make_sampler(DiffusionSettings(entropy_bound=bound))(logits, temperature, 0, torch.Generator())
            assert kept.where.nonzero().flatten().tolist() == places


def test_by_confidence_likely_words_are_more_frequent_than_in_the_model() -> None:
    """Two independent places with p = 0.7 and 0.3, one kept a pass. The first that is kept is a likely word unless
    neither was drawn (0.09), the second one at 0.7: 0.805 of all, and not 0.7. It must be said, so it is measured."""
    logits = torch.tensor([[-torch.inf, 0.7, 0.3]] * 2)
    logits[:, 1:] = logits[:, 1:].log()
    sampler = make_sampler(DiffusionSettings(block=2, sampler="confidence", steps=2, threshold=1.0))
    generator = torch.Generator().manual_seed(2)
    likely = 0
    for _ in range(DRAWS):
        first = sampler(logits, 1.0, 0, generator)
        assert int(first.where.sum()) == 1
        second = sampler(logits[~first.where], 1.0, 1, generator)
        likely += int((first.tokens[first.where] == 1).sum() + (second.tokens == 1).sum())
    assert likely / (2 * DRAWS) == pytest.approx(0.805, abs=5 * (0.805 * 0.195 / (2 * DRAWS)) ** 0.5)


@pytest.mark.parametrize("sampler", ["entropy", "confidence"])
def test_temperature_0_takes_the_likeliest_and_tells_its_probability(sampler: str) -> None:
    logits = torch.tensor([[-torch.inf, 2.0, 1.0, 0.0], [-torch.inf, 0.0, 3.0, 1.0]])
    settings = DiffusionSettings(block=2, sampler=sampler, entropy_bound=9.0, steps=1)  # type: ignore[arg-type]
    kept = make_sampler(settings)(logits, 0.0, 0, torch.Generator())
    assert kept.where.all()
    assert kept.tokens.tolist() == [1, 2]
    assert kept.logprobs.tolist() == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)


def test_temperature_sharpens_what_is_sampled() -> None:
    logits = torch.tensor([[0.0, 1.0]]).repeat(DRAWS, 1)
    kept = make_sampler(DiffusionSettings(entropy_bound=1e6))(logits, 0.5, 0, torch.Generator().manual_seed(0))
    right = torch.tensor(2.0).sigmoid().item()
    assert kept.tokens.float().mean().item() == pytest.approx(right, abs=5 * (right * (1 - right) / DRAWS) ** 0.5)
    assert kept.logprobs[kept.tokens == 1][0].exp().item() == pytest.approx(right, abs=1e-5)


def test_the_mask_has_no_probability() -> None:
    shares = without_mask(torch.zeros(2, 4), mask=2).softmax(-1)
    assert shares.tolist() == [[pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0, pytest.approx(1 / 3)]] * 2


def test_settings_that_cannot_be_meant_are_refused() -> None:
    wrong = [{"block": 0}, {"steps": 0}, {"block": 4, "steps": 5}, {"entropy_bound": -1.0}, {"threshold": 0.0}]
    for given in wrong:
        with pytest.raises(ValueError, match=rf"diffusion\.{list(given)[-1]}"):
            DiffusionSettings(**given)  # type: ignore[arg-type]
