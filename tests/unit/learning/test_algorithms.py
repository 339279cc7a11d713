"""If these fail, a name in the settings means another algorithm than the one of that name, or nonsense is accepted."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from imagination.learning.advantages import gae, group, reinforce, turns
from imagination.learning.algorithms import ALGORITHMS, Algorithm, Episodes, total
from imagination.learning.algorithms.advantage import with_penalties
from imagination.learning.losses import auxiliary, policy, terms
from imagination.settings import AlgorithmSettings
from imagination.settings.algorithm_parts import (
    BestOfGroups,
    BilevelGae,
    Critic,
    DynamicSampling,
    Entropy,
    GroupRelative,
    ImplicitSteps,
    Kl,
    PpoClip,
    TokenGae,
    TurnGae,
)

INDEX = torch.tensor([[0, 0, -1, 1, -1, -1], [0, -1, -1, 1, 1, -1], [0, 0, -1, -1, -1, -1], [0, -1, 1, 1, 1, -1]])
EPISODES = Episodes(
    turn_rewards=torch.tensor([[0.0, 1.0], [0.5, 0.0], [float("nan"), 0.0], [0.0, 0.0]]),
    action_turn_index=INDEX,
    group_ids=torch.tensor([4, 4, 4, 4]),
    valid=torch.tensor([True, True, False, True]),
    anchors=torch.tensor([[1, 2], [1, 3], [1, -1], [1, 2]]),
    step_rewards=torch.tensor([[0.1, 0.3], [float("nan"), -0.2], [float("nan"), 9.0], [0.0, 0.1]]),
    values=torch.linspace(-1, 1, 24).view(4, 6),
    bootstrap_value=torch.tensor([0.3, 0.0, float("nan"), -0.5]),
)
ACTED = (INDEX >= 0) & EPISODES.valid[:, None]


def tokens(**changes):
    """Tokens [n] of all rows, with everything that any algorithm reads."""
    rng = torch.Generator().manual_seed(0)
    logprobs = (torch.rand(24, generator=rng) - 2).requires_grad_()
    old = logprobs.detach() + 0.3 * torch.randn(24, generator=rng)
    basis = {
        "logprobs": logprobs,
        "behavior_logprobs": old,
        "advantages": torch.randn(24, generator=rng),
        "weight": ACTED.float().flatten(),
        "sequences": torch.arange(4).repeat_interleave(6),
        "turns": policy.turn_segments(INDEX).flatten(),
        "ref_logprobs": old - 0.1,
        "entropy": torch.rand(24, generator=rng),
        "values": torch.randn(24, generator=rng),
        "old_values": torch.randn(24, generator=rng),
        "returns": torch.randn(24, generator=rng),
        "learned": ACTED.flatten(),
    }
    return terms.LossInputs(**{**basis, **changes})


# --- the registry ---


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_are_frozen_named_once_and_documented(name):
    chosen = ALGORITHMS[name]
    parts = [chosen.advantage, chosen.surrogate, chosen.critic, chosen.kl, chosen.entropy, chosen.sampling]
    names = [f.name for part in parts if part is not None for f in fields(part)]
    assert len(names) == len(set(names))
    assert set(chosen.settings) == {*names, "aggregation"}
    assert all(f"        {name}: " in AlgorithmSettings.__doc__ for name in chosen.settings)
    with pytest.raises(FrozenInstanceError):
        chosen.kl.kl_coef = 1.0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"gamma": 1.0, "lam": 0.95, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "value_clip": 0.2}),
        ("grpo", {"normalise_std": True, "std_eps": 1e-4, "kl_coef": 0.0}),
        ("dr_grpo", {"normalise_std": False, "aggregation": "constant"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "drop_equal_groups": True, "aggregation": "token_mean"}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean", "token_form": False}),
        ("gspo_token", {"token_form": True}),
        ("cispo", {"ratio_min": 0.0, "ratio_max": 5.0}),
        ("gigpo", {"gamma": 0.95, "step_weight": 1.0}),
        ("istar", {"prm_beta": 0.05, "step_weight": 1.0}),
        ("st_ppo", {"clip_low": 0.2, "correct_bias": True}),
        ("reinforce_pp", {"whiten": True, "kl_in": "reward"}),
    ],
)
def test_defaults_are_those_of_the_papers(name, settings):
    assert {key: ALGORITHMS[name].settings[key] for key in settings} == settings


def test_settings_reach_their_part():
    chosen = ALGORITHMS["grpo"].with_settings(
        clip_high=0.3, kl_coef=0.1, normalise_std=False, aggregation="sequence_mean"
    )
    assert chosen.surrogate == PpoClip(clip_high=0.3)
    assert chosen.kl == Kl(kl_coef=0.1)
    assert chosen.advantage == GroupRelative(normalise_std=False)
    assert chosen.aggregation == "sequence_mean"
    assert ALGORITHMS["grpo"].settings["clip_high"] == 0.2


# --- contradictions ---


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"value_coef": 0.5}, "value_coef .* grpo: .* ppo, st_ppo, turn_ppo, bilevel_ppo"),
        ("grpo", {"lam": 0.9}, "lam .* grpo: .* ppo, st_ppo, turn_ppo"),
        ("reinforce", {"clip_high": 0.3}, "clip_high .* reinforce: .* ppo, grpo"),
        ("ppo", {"clip_hihg": 0.3}, "clip_hihg .* no algorithm"),
        ("filtered_bc", {"keep_fraction": 0.0}, "keep_fraction must lie"),
        ("ppo", {"value_coef": 0.0}, "value_coef must be positive"),
        ("ppo", {"value_clip": 0.0}, "value_clip must be positive"),
        ("ppo", {"lam": 1.5}, "lam must lie"),
        ("ppo", {"dual_clip": 0.5}, "dual_clip .* larger than 1"),
        ("ppo", {"drop_equal_groups": True}, "set drop_equal_groups=false"),
        ("grpo", {"kl_estimator": "k1"}, "set kl_estimator to k2 or k3, or kl_in=reward"),
        ("grpo", {"kl_coef": -1.0}, "kl_coef .* at least 0"),
        ("grpo", {"kl_in": "prompt"}, "kl_in loss or reward"),
        ("grpo", {"std_eps": 0.0}, "std_eps must be positive"),
        ("grpo", {"aggregation": "mean"}, "aggregation must be"),
        ("grpo", {"entropy_smoothing": 1.0}, "multiplied by entropy_coef, which is 0"),
        ("epo", {"entropy_low": 1.5}, "set entropy_low <= 1 <= entropy_high"),
        ("epo", {"entropy_coef": -1.0}, "at least 0"),
        ("cispo", {"ratio_max": 0.5}, "ratio_min <= 1 <= ratio_max"),
        ("gigpo", {"step_weight": -1.0}, "step_weight .* at least 0"),
        ("istar", {"prm_beta": 0.0}, "prm_beta and prm_lr above 0"),
        ("gspo", {"clip_low": 1.5}, "clip_low must lie"),
        ("turn_ppo", {"gamma": 2.0}, "turn_ppo: gamma and lam"),
        ("bilevel_ppo", {"token_lam": 2.0}, "token_gamma and token_lam"),
        ("dapo", {"overlong_buffer": 9, "max_tokens": 8}, "at most max_tokens = 8"),
        ("dapo", {"overlong_buffer": -1}, "overlong_buffer .* at least 0"),
        ("dr_grpo", {"max_tokens": 0}, "max_tokens .* at least 1"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_what_to_change(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ALGORITHMS[name].with_settings(**settings)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="TokenGae reads values"):
        Algorithm("mine", TokenGae(), PpoClip())
    with pytest.raises(ValueError, match="GroupRelative reads no"):
        Algorithm("mine", GroupRelative(), PpoClip(), critic=Critic())


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        ("grpo", {"group_size": 1}, "set train.group_size to 2 or more"),
        ("rloo", {"group_size": 1}, "set train.group_size to 2 or more"),
        ("reinforce", {"group_size": 1, "steps_per_update": 2}, "set train.epochs=1 and train.minibatches=1"),
        ("dr_grpo", {"group_size": 4}, "aggregation=constant needs max_tokens"),
    ],
)
def test_runs_that_cannot_use_it_are_refused(name, run, message):
    with pytest.raises(ValueError, match=message):
        ALGORITHMS[name].check_run(**run)


def test_runs_that_can_use_it_are_not():
    ALGORITHMS["ppo"].check_run(group_size=1, steps_per_update=8)
    ALGORITHMS["reinforce"].check_run(group_size=1)
    ALGORITHMS["filtered_bc"].check_run(group_size=1, steps_per_update=3)
    ALGORITHMS["dr_grpo"].with_settings(max_tokens=8).check_run(group_size=2)
    with pytest.raises(ValueError, match="overlong_buffer needs max_tokens"):
        ALGORITHMS["dapo"].with_settings(overlong_buffer=4).check_run(group_size=2)


# --- judging ---


def test_each_name_is_its_advantage():
    """The parts call the functions of the same name, with the settings, on the valid rows."""
    returns, ids, valid = torch.tensor([1.0, 0.5, 0.0, 0.0]), EPISODES.group_ids, EPISODES.valid
    over = turns.broadcast_over_tokens
    paid = EPISODES.turn_rewards.nan_to_num()
    index = INDEX.masked_fill(~valid[:, None], -1)
    placed, values = turns.place_turn_rewards(paid, index), EPISODES.values
    to_go = reinforce.returns_to_go(placed, ACTED, 1.0)
    best = group.best_of_groups(returns, ids, valid, BestOfGroups(0.25, 0.99))
    grpo = over(group.group_relative(returns, ids, valid)[0], ACTED)
    after = EPISODES.bootstrap_value
    token = gae.masked_gae(placed, values, ACTED, TokenGae(1.0, 0.95), after)[0]
    turn = gae.turn_gae(paid, values, index, TurnGae(1.0, 0.95), after)[0]
    both = gae.bilevel_gae(paid, values, index, BilevelGae(0.95, 0.95, 1.0, 1.0), after)[0]
    expected = {
        "ppo": reinforce.whiten(token, ACTED),
        "st_ppo": reinforce.whiten(token, ACTED),
        "turn_ppo": reinforce.whiten(turn, ACTED),
        "bilevel_ppo": reinforce.whiten(both, ACTED),
        **dict.fromkeys(("grpo", "dapo", "gspo", "gspo_token", "cispo", "epo"), grpo),
        "dr_grpo": over(group.group_relative(returns, ids, valid, GroupRelative(normalise_std=False))[0], ACTED),
        "rloo": over(group.leave_one_out(returns, ids, valid)[0], ACTED),
        "reinforce": to_go,
        "reinforce_pp": reinforce.whiten(to_go, ACTED),
        "reinforce_pp_baseline": reinforce.reinforce_pp_baseline(returns, ids, valid, ACTED)[0],
        "gigpo": group.gigpo(paid, index, EPISODES.anchors, ids, valid)[0],
        "istar": group.istar(paid, index, EPISODES.step_rewards, ids, valid, ImplicitSteps())[0],
        "filtered_bc": over(best.float(), ACTED),
    }
    assert set(expected) == set(list(ALGORITHMS))
    for name, found in expected.items():
        torch.testing.assert_close(
            ALGORITHMS[name].judge(EPISODES).advantages, found, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_kl_and_overlong_penalties_reach_the_rewards():
    kl = torch.full(INDEX.shape, 0.5).masked_fill(INDEX < 0, float("nan"))
    penalties = Kl(kl_coef=0.1, kl_in="reward"), DynamicSampling(max_tokens=4, overlong_buffer=2)
    shaped = with_penalties(replace(EPISODES, kl=kl), *penalties)
    # 3, 3, failed and 4 tokens; lengths above 2 are punished by half and one; 0.05 is taken from each token
    assert shaped.turn_rewards.sum(1).tolist() == pytest.approx([1 - 0.15 - 0.5, 0.5 - 0.15 - 0.5, 0.0, -0.2 - 1.0])
    assert EPISODES.earned.sum(1).tolist() == [1.0, 0.5, 0.0, 0.0]
    torch.testing.assert_close(shaped.token_rewards.sum(1), shaped.turn_rewards.sum(1))
    assert shaped.turn_rewards[0].tolist() == pytest.approx([-0.1, 1 - 0.05 - 0.5])
    judged = (
        ALGORITHMS["reinforce"]
        .with_settings(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
        .judge(replace(EPISODES, kl=kl))
    )
    assert judged.advantages[0].tolist() == pytest.approx([0.85, 0.9, 0.0, 0.95, 0.0, 0.0])


def test_missing_inputs_are_named():
    bare = replace(EPISODES, values=None, anchors=None, step_rewards=None)
    for name, settings, message in (
        ("ppo", {}, "give Episodes.values, or choose one without"),
        ("gigpo", {}, "give Episodes.anchors"),
        ("istar", {}, "give Episodes.step_rewards"),
        ("reinforce_pp", {"kl_coef": 0.1}, "give Episodes.kl, or set kl_in=loss"),
        ("dapo", {"overlong_buffer": 2}, "overlong_buffer needs max_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ALGORITHMS[name].with_settings(**settings).judge(bare)


def test_dynamic_sampling_leaves_equal_groups_out_of_loss_and_denominator():
    """A solved group is uninformative, though its lengths, and so its penalties, differ."""
    solved = replace(EPISODES, turn_rewards=torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
    dapo = ALGORITHMS["dapo"].with_settings(overlong_buffer=2, max_tokens=4)
    assert not dapo.judge(solved).trained.any()
    assert dapo.weigh(dapo.judge(solved).trained)[1] == 0
    assert dapo.judge(EPISODES).trained.any()
    assert ALGORITHMS["rloo"].judge(solved).trained.any()


def test_loss_mask_and_advantage_mask_are_apart():
    """Each can be given without the other: loss on observations, or advantages over them."""
    rows = EPISODES.valid[:, None].expand_as(INDEX)
    everything = torch.ones_like(rows)
    ppo = ALGORITHMS["ppo"].with_settings(whiten=False)
    usual = ppo.judge(EPISODES)
    loss_only = ppo.judge(replace(EPISODES, loss_mask=everything))
    assert torch.equal(loss_only.trained, rows)
    assert torch.equal(loss_only.advantages, usual.advantages)
    both = ppo.judge(replace(EPISODES, loss_mask=everything, advantage_mask=everything))
    assert (both.advantages[rows] != 0).all()
    advantage_only = ppo.judge(replace(EPISODES, advantage_mask=everything))
    assert torch.equal(advantage_only.trained, usual.trained)
    assert torch.equal(advantage_only.advantages, both.advantages)
    assert not torch.equal(advantage_only.advantages[ACTED], usual.advantages[ACTED])  # observations are values now
    first_turn = ppo.judge(replace(EPISODES, loss_mask=INDEX == 0))
    assert torch.equal(first_turn.trained, (INDEX == 0) & rows)
    for name in ("gigpo", "istar", "turn_ppo", "bilevel_ppo"):
        with pytest.raises(ValueError, match="have no advantage_mask"):
            ALGORITHMS[name].judge(replace(EPISODES, advantage_mask=everything))


# --- descending ---


@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_have_a_gradient_on_trained_tokens_only(name):
    batch = tokens()
    chosen = ALGORITHMS[name].with_settings(
        **({"clip_low": 0.9, "clip_high": 9.0} if "clip_low" in ALGORITHMS[name].settings else {})
    )
    terms = chosen.losses(batch, 7.0, critic_denominator=5.0, entropy_history=1.0)
    assert ("critic" in terms) is (chosen.critic is not None)
    assert ("entropy" in terms) is (name == "epo")
    for part in terms.values():  # a metric that is kept must not keep the graph
        assert not any(x.requires_grad for x in (part.tokens, *part.sums.values(), *part.maxima.values()))
    total(terms).backward()
    trained = ACTED.flatten()
    assert (batch.logprobs.grad[~trained] == 0).all()
    assert (batch.logprobs.grad[trained] != 0).all()


def test_terms_are_times_their_coefficients():
    batch = tokens(logprobs=torch.linspace(-2, -1, 24))
    chosen = Algorithm(
        "mine", TokenGae(), PpoClip(), critic=Critic(value_coef=0.3), kl=Kl(kl_coef=0.2, kl_estimator="k2"),
        entropy=Entropy(entropy_coef=0.1),
    )  # fmt: skip
    terms = chosen.losses(batch, 7.0, critic_denominator=5.0)
    kl = auxiliary.kl_k2(batch.logprobs, batch.ref_logprobs) * batch.weight
    critic = auxiliary.value_loss(
        batch.values, batch.old_values, batch.returns, batch.learned, Critic(value_coef=1.0), denominator=5
    )
    assert float(terms["kl"].loss) == pytest.approx(0.2 * float(kl.sum()) / 7)
    assert float(terms["critic"].loss) == pytest.approx(0.3 * float(critic.loss))
    assert float(terms["entropy"].loss) == pytest.approx(-0.1 * float((batch.entropy * batch.weight).sum()) / 7)
    assert float(total(terms)) == pytest.approx(sum(float(part.loss) for part in terms.values()))


@pytest.mark.parametrize(
    ("name", "settings", "missing"),
    [
        ("gspo", {}, "sequences"),
        ("st_ppo", {}, "turns"),
        ("grpo", {"kl_coef": 0.1}, "ref_logprobs"),
        ("epo", {}, "entropy"),
        ("ppo", {}, "values"),
        ("ppo", {}, "returns"),
    ],
)
def test_missing_tokens_are_named(name, settings, missing):
    with pytest.raises(ValueError, match=f"give LossInputs.{missing}"):
        ALGORITHMS[name].with_settings(**settings).losses(tokens(**{missing: None}), 7.0, critic_denominator=5.0)
    with pytest.raises(ValueError, match="give critic_denominator"):
        ALGORITHMS["ppo"].losses(tokens(), 7.0)


def test_weights_follow_the_aggregation():
    trained = torch.tensor([[True, True, False], [True, False, False]])
    assert ALGORITHMS["grpo"].weigh(trained)[1] == 3
    assert ALGORITHMS["gspo"].weigh(trained)[0].tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    assert ALGORITHMS["dr_grpo"].with_settings(max_tokens=5).weigh(trained)[1] == 10
    with pytest.raises(ValueError, match="needs max_tokens"):
        ALGORITHMS["dr_grpo"].weigh(trained)
    assert DynamicSampling() == ALGORITHMS["rloo"].sampling
