"""If these fail, some architecture is played with log-probs that are not its own, or a lower precision goes unnoticed.

The oracle is transformers: one full forward pass for log-probs, ``generate`` for greedy text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from policy.lm.backbone import with_lora
from policy.lm.engine import Sampling, UnsupportedModel
from policy.lm.engines.inprocess import graphs, slot_engine
from policy.lm.engines.inprocess.decode import GenericDecoder, LlamaDecoder, make_decoder
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.graphs import affordable_widths
from policy.lm.engines.inprocess.slots import Feed
from policy.lm.forward import decoder, token_logits
from policy.lm.native.steps import SWITCH
from policy.lm.settings import EngineSettings, LoraSettings
from tests.support.asking import VOCAB, prompt, together
from tests.support.engines import CONTEXT, NEVER, assert_scored, generate, make_model, shake, teacher_forced

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def build(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return shake(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SHAPE, **more})))


ZOO: dict[str, tuple[type, str, dict[str, Any]]] = {
    "llama": (LlamaDecoder, "llama", {}),
    "llama with long contexts": (LlamaDecoder, "llama", {"rope_parameters": LLAMA3}),
    "yarn": (LlamaDecoder, "llama", {"rope_parameters": YARN}),
    "wide heads": (LlamaDecoder, "llama", {"head_dim": 16}),
    "wider heads, compiled attention": (LlamaDecoder, "llama", {"head_dim": 32}),
    "tied": (LlamaDecoder, "llama", {"tie_word_embeddings": True}),
    "mistral": (LlamaDecoder, "mistral", {"sliding_window": None}),
    "qwen2, biases": (LlamaDecoder, "qwen2", {}),
    "qwen3, normed heads": (LlamaDecoder, "qwen3", {"head_dim": 8}),
    "qwen3, compiled attention": (LlamaDecoder, "qwen3", {"head_dim": 32}),
    "biases everywhere": (GenericDecoder, "llama", {"attention_bias": True, "mlp_bias": True}),
    "dynamic rope": (GenericDecoder, "llama", {"rope_parameters": DYNAMIC}),
    "another activation": (GenericDecoder, "llama", {"hidden_act": "gelu"}),
    "granite, multipliers": (GenericDecoder, "granite", {"residual_multiplier": 0.7, "logits_scaling": 8.0}),
    "olmo2": (GenericDecoder, "olmo2", {}),
    "cohere, multiplied logits": (GenericDecoder, "cohere", {"logit_scale": 0.25}),
    "gemma2, capped logits": (GenericDecoder, "gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "hyperclovax, granite's word for a multiplier": (GenericDecoder, "hyperclovax", {"logits_scaling": 0.2}),
    "a mask that is added": (GenericDecoder, "llama", {"hidden_act": "gelu", "attn_implementation": "eager"}),
    "mixtral, experts": (GenericDecoder, "mixtral", {"num_local_experts": 4}),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [(n, c) for n in ZOO for c in (True, False) if c or ZOO[n][0] is LlamaDecoder]
)
def test_each_architecture_plays_its_own_probabilities(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns of five sessions of different lengths, greedy and sampled; and the decoder is the one expected, or a
    fast path could silently be used for a model that it does not compute (or never be used at all)."""
    kind, model_type, more = ZOO[name]
    monkeypatch.setenv(SWITCH, str(int(compiled)))
    model = build(model_type, **more)
    engine = InProcessEngine(model, CONTEXT)
    assert type(engine._decoder) is kind
    histories = [prompt(length, seed=length) for length in (3, 17, 1, 30, 9)]
    for turn in range(3):
        temperature = (0.0, 1.7, 0.0)[turn]
        expected = [generate(model, history, 6, NEVER) for history in histories]
        got = together(
            *(
                engine.complete(h, Sampling(6, NEVER, temperature), seed=turn, session=row)
                for row, h in enumerate(histories)
            )
        )
        for row, completion in enumerate(got):
            assert_scored(model, histories[row], completion, temperature or 1.0)
            if not temperature:
                assert completion.ids == expected[row]
            histories[row] += [*completion.ids, *prompt(2 + 5 * row, seed=100 * turn + row)]


LLAMA_LIKE = [name for name, (kind, _, _) in ZOO.items() if kind is LlamaDecoder]


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_steps_of_fixed_shapes_have_the_hidden_states_of_others(name: str) -> None:
    """Prompts of three sequences, then seven steps of two of them and of one, most of one token and some of several, of
    which some are asked for; new weights are taken over in between.
    Keys and values of all are the same, those of a sequence that stood still, too."""
    _, model_type, more = ZOO[name]
    model = build(model_type, **more)
    plain, fixed = (make_decoder(model, CONTEXT, 5, torch.float32, fixed) for fixed in (False, True))
    lengths = np.array([4, 0, 9, 0, 2])
    for step in range(8):
        if step in (0, 4):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.0 + 0.1 * step)
            plain.refresh()
            fixed.refresh()
        slots = np.array([[0, 2, 4], [0, 4], [2]][min(step, 1 + step % 2)])
        counts = lengths[slots] if step == 0 else np.array([1, 1 + 8 * (step % 3 == 0)])[: len(slots)]
        starts = np.zeros_like(counts) if step == 0 else lengths[slots]
        tokens = np.random.default_rng(step).integers(3, VOCAB, counts.sum())
        wanted = np.flatnonzero(np.arange(counts.sum()) % 3 == 0) if step == 3 else np.cumsum(counts) - 1
        states = [decoder.hidden(Feed(slots, starts, counts, tokens, wanted)) for decoder in (plain, fixed)]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
        lengths[slots] += counts * (step > 0)
    waste = plain.cache.waste_position
    torch.testing.assert_close(fixed.cache.kv[..., :waste, :], plain.cache.kv[..., :waste, :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widths", [(1,), (1, 8), (1, 4, 16)])
def test_an_engine_with_steps_of_fixed_shapes_says_what_others_say(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that begin and end at different times; some steps read prompts, and some are of single tokens alone."""
    model = make_model()

    def complete(engine: InProcessEngine) -> list[tuple[int, ...]]:
        asked = [
            engine.complete(prompt(3 + 5 * k, seed=k), Sampling(2 + 3 * k, NEVER), seed=k, session=k) for k in range(6)
        ]
        return [c.ids for c in together(*asked)]

    expected = complete(InProcessEngine(model, CONTEXT, EngineSettings(slots=3)))
    monkeypatch.setattr(slot_engine, "make_decoder", lambda *args: make_decoder(*args[:-1], graphs=True))
    monkeypatch.setattr(graphs, "_WIDTHS", widths)
    engine = InProcessEngine(model, CONTEXT, EngineSettings(slots=3))
    most: list[int] = []
    hidden = engine._decoder.hidden
    monkeypatch.setattr(engine._decoder, "hidden", lambda feed: most.append(feed.counts.max()) or hidden(feed))
    assert complete(engine) == expected
    assert most.count(1) > 10
    assert 3 <= len(most) - most.count(1) < most.count(1)
    assert max(most) == (28 if widths == (1,) else widths[-1]), "longer prompts are read in pieces"


def test_graphs_are_as_wide_as_a_card_computes_while_the_host_launches() -> None:
    """SmolLM2-135M with 384 slots: 106 million parameters beside the embeddings, 64 x 384 x 2 x 0.106e9 = 5.2e12 of
    30 x 4e11 operations. Half a billion: 256 x 64 x 2 x 0.36e9 = 1.18e13 of 24 x 4e11 are too many, with 16 not."""
    assert affordable_widths(384, 30, 106_000_000) == (1, 16, 64)
    assert affordable_widths(256, 24, 360_000_000) == (1, 16)
    assert affordable_widths(256, 32, 6_500_000_000) == (1,)


def test_lora_weights_are_those_of_the_moment() -> None:
    """Adapters are added when weights are updated, also to cached keys; the trainer's model is not merged by it."""
    model = with_lora(make_model(), LoraSettings(rank=4, alpha=8))
    engine = InProcessEngine(model, CONTEXT)
    assert type(engine._decoder) is LlamaDecoder
    ids = prompt(9, seed=1)
    for step in range(2):
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_" in n:
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 0.2)
        engine.update_weights()
        (completion,) = together(engine.complete(ids, Sampling(6, NEVER), 0, session="s"))
        assert completion.version == step + 1
        assert_scored(model, ids, completion, 1.0)
        second = [*ids, *completion.ids, 4, 9]
        assert_scored(model, second, *together(engine.complete(second, Sampling(5, NEVER), 1, session="s")), 1.0)
        with model.disable_adapter():
            assert completion.logprobs != pytest.approx(teacher_forced(model, ids, completion, 1.0), abs=1e-2)
    assert any("lora_" in n for n, _ in model.named_parameters())


@pytest.mark.parametrize("ends", ["lm_head", "embed_tokens"])
def test_adapters_of_output_and_embeddings_play(ends: str) -> None:
    model = with_lora(build("llama"), LoraSettings(rank=4, target_modules=f".*(_proj|{ends})"))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.copy_(torch.randn(weight.shape, generator=rng) * 0.2)
    ids = prompt(9, seed=1)
    (completion,) = together(InProcessEngine(model, CONTEXT).complete(ids, Sampling(6, NEVER), 0))
    assert_scored(model, ids, completion, 1.0)


def test_bf16_log_probs_stay_within_their_tolerance() -> None:
    """Stated for bf16: 0.05 in the mean over tokens of models as sharp as trained ones; fp32 is exact to 1e-4."""
    model = make_model(std=0.05)
    engine = InProcessEngine(model, CONTEXT, EngineSettings(dtype="bfloat16"))
    rows = [prompt(10 + 7 * k, seed=k) for k in range(8)]
    got = together(*(engine.complete(ids, Sampling(20, NEVER), seed=k) for k, ids in enumerate(rows)))
    off = [
        abs(a - b)
        for ids, completion in zip(rows, got, strict=True)
        for a, b in zip(completion.logprobs, teacher_forced(model, ids, completion, 1.0), strict=True)
    ]
    assert 1e-4 < sum(off) / len(off) < 0.05


@pytest.mark.parametrize("name", ZOO)
def test_what_is_trained_are_the_same_probabilities(name: str) -> None:
    """Logits that losses are made of; also where a configuration holds a word that this kind of model does not know."""
    _, kind, more = ZOO[name]
    model = build(kind, **more)
    if not any(hasattr(type(model.config), word) for word in ("logit_scale", "logits_scaling")):
        model.config.logit_scale = model.config.logits_scaling = 3.0
    ids = torch.tensor([prompt(12, seed=0)])
    with torch.no_grad():
        hidden = decoder(model)(ids, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(token_logits(model, hidden), model(ids).logits[0], rtol=1e-5, atol=1e-5)


def test_a_model_that_does_something_else_with_its_logits_is_refused() -> None:
    """There will be others than those known."""
    model = build("llama", hidden_act="gelu")
    own = model.forward

    def louder(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    InProcessEngine(model, CONTEXT)
    model.forward = louder
    with pytest.raises(UnsupportedModel, match="not played faithfully"):
        InProcessEngine(model, CONTEXT)


def test_a_dtype_that_only_copies_of_weights_could_have_is_refused() -> None:
    """Before any episode: keys of one dtype in a cache of another would break every request."""
    model = build("granite")
    with pytest.raises(UnsupportedModel, match=r"torch.float32, not in torch.bfloat16: set engine.dtype=auto"):
        InProcessEngine(model, CONTEXT, EngineSettings(dtype="bfloat16"))
    engine = InProcessEngine(model.to(torch.bfloat16), CONTEXT)
    (completion,) = together(engine.complete(prompt(9, seed=0), Sampling(5, NEVER), 0))
    assert len(completion.ids) == 5


def test_a_long_prompt_does_not_pad_rows_that_decode() -> None:
    """At most twofold: six rows of 152 tokens, the longest of 130, are not six times 130. States are those of each row
    alone, in the order in which they are wanted."""
    model = build("granite")
    generic = make_decoder(model, CONTEXT, 6, torch.float32)
    texts = [prompt(n, seed=n) for n in (21, 4, 130, 17, 60, 9)]
    starts = np.array([20, 3, 0, 16, 50, 0])
    counts = np.array([len(text) for text in texts]) - starts

    def feed(rows: list[int], low: np.ndarray, high: np.ndarray, wanted: list[int]) -> torch.Tensor:
        tokens = np.concatenate([texts[r][low[r] : high[r]] for r in rows])
        with torch.no_grad():
            return generic.hidden(Feed(np.array(rows), low[rows], (high - low)[rows], tokens, np.array(wanted, int)))

    assert len(feed([0, 1, 3, 4], np.zeros(6, int), starts, [])) == 0
    seen: list[int] = []
    decoder(model).embed_tokens.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    # the last token of each row, and one in the middle of the long one and of the one before the last
    flat = [0, 1, 40, 131, 132, 136, 142, 151]
    got = feed(list(range(6)), starts, starts + counts, flat)
    assert 152 <= sum(seen) <= 2 * 152
    at = [(0, 20), (1, 3), (2, 38), (2, 129), (3, 16), (4, 53), (4, 59), (5, 8)]
    for state, (row, position) in zip(got, at, strict=True):
        with torch.no_grad():
            alone = decoder(model)(torch.tensor([texts[row]]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(state, alone[position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral", {"sliding_window": 32}),
        ("mistral", {"sliding_window": 32, "layer_types": ["full_attention"] * 2}),  # a word that it does not know
        ("phi3", {"sliding_window": 32}),
        ("mixtral", {"sliding_window": 32, "num_local_experts": 4}),
        ("starcoder2", {"sliding_window": 32}),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_window_shorter_than_the_context_is_refused(kind: str, more: dict[str, Any]) -> None:
    """Such a model forgets; with full attention it would be another model. Within the window it is played."""
    model = build(kind, **more)
    with pytest.raises(UnsupportedModel, match="lower the context"):
        InProcessEngine(model, CONTEXT)
    ids = prompt(12, seed=0)
    (completion,) = together(InProcessEngine(model, 32).complete(ids, Sampling(10, NEVER), 0))
    assert_scored(model, ids, completion, 1.0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2_moe", {"sliding_window": 32, "use_sliding_window": False, "num_experts": 4}),
    ],
)
def test_a_window_that_no_layer_has_is_none(kind: str, more: dict[str, Any]) -> None:
    model = build(kind, **more)
    ids = prompt(60, seed=0)
    (completion,) = together(InProcessEngine(model, CONTEXT).complete(ids, Sampling(10, NEVER), 0))
    assert_scored(model, ids, completion, 1.0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("mamba", {"state_size": 4}), ("deepseek_v3", {"n_routed_experts": 4, "first_k_dense_replace": 2})],
)
def test_models_without_standard_attention_are_refused(kind: str, more: dict[str, Any]) -> None:
    """A state-space model has no keys and values to keep, and latent attention keeps something else."""
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, **more)
    )
    with pytest.raises(UnsupportedModel, match="standard attention"):
        InProcessEngine(model, CONTEXT)
