"""If these fail, the log says of dreamed tokens what is true of real ones, or of all together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imagination.settings import AlgorithmSettings
from real_envs.trajectory import Source
from tests.support.plain import DEFAULTS, EXPERTS, grpo_rows, make_model, update

KEYS = ("rl_tokens", "policy_loss", "ratio", "clip_fraction", "kl_k3", "kl_k1", "entropy")


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("micro_tokens", [1, 10**6])
def test_each_source_is_logged_as_if_it_were_alone(name: Any, micro_tokens: int) -> None:
    """Ratios of sequences too, and however the rows are split."""
    model = make_model()
    rows = grpo_rows(model)
    dreamed, real = rows[:2], [replace(row, source=Source.REAL) for row in rows[2:]]
    settings = AlgorithmSettings(name, aggregation="token_mean")
    train = replace(DEFAULTS, micro_tokens=micro_tokens)
    _, mixed = update(model, [*dreamed, EXPERTS[0], *real], settings, train)
    for source, alone in (("dream", dreamed), ("real", real)):
        _, metrics = update(model, alone, settings, train)
        for key in KEYS:
            if key not in metrics:  # one estimate of the KL or the other
                continue
            assert mixed[f"{key}_{source}"] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
    assert mixed["rl_tokens_dream"] + mixed["rl_tokens_real"] == mixed["rl_tokens"]
    assert mixed["expert_entropy"] > 0


def test_advantages_and_pull_by_hand() -> None:
    """REINFORCE pulls at a token by |A| / n, an expert's token by expert_coef / n of the experts."""
    model = make_model()
    rows = grpo_rows(model)
    dreamed, real = rows[:2], [replace(row, source=Source.REAL) for row in rows[2:]]
    size = {
        source: sum(float(row.advantages.abs().sum()) for row in some)
        for source, some in (("dream", dreamed), ("real", real))
    }
    n = {
        source: sum(int((row.rl_weight != 0).sum()) for row in some)
        for source, some in (("dream", dreamed), ("real", real))
    }
    _, metrics = update(model, [*rows[:2], *real, *EXPERTS], AlgorithmSettings("reinforce"))
    pull = {source: size[source] / (n["dream"] + n["real"]) for source in size} | {"expert": DEFAULTS.expert_coef}
    for source in ("dream", "real"):
        assert metrics[f"advantage_{source}"] == pytest.approx(size[source] / n[source], rel=1e-5)
    for source, found in pull.items():
        assert metrics[f"gradient_share_{source}"] == pytest.approx(found / sum(pull.values()), rel=1e-4)
    hotter = [replace(row, temperature=1.3) for row in (*rows[:2], *real)]
    _, hot = update(model, [*hotter, *EXPERTS], AlgorithmSettings("reinforce"))
    assert hot["gradient_share_expert"] == pytest.approx(metrics["gradient_share_expert"], rel=1e-4)
