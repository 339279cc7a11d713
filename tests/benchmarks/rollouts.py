"""How fast episodes are dreamed: 64 episodes of 10 turns, 8 tokens an action, 48 an observation, both models sampled.

Models have random weights and never stop by themselves, so every competitor writes exactly the same number of tokens:
transformers' ``generate`` on left-padded batches that re-send the whole history each turn, vLLM (in its own virtual
environment), and the in-process engine. The engine's drafts from a log are measured apart, with a world model that was
trained on real TextWorld episodes (``dreams``), because random text cannot be guessed.

All compute in fp32, since ``generate`` does; bf16 has rows of its own. vLLM plays once eager and once compiled, and
then in the way that was faster. Each side plays in processes of its own, in turns; a first dream warms it up.

Limits of how fast dreams could be, from rates that this machine reaches in the same run:

*products*: every token passes each model once and every sampled token the output head once, as matrix products at the
best of several batch sizes. Nothing else costs time, not even that one token follows another.

*decoding*: sampled tokens come one after the other, so their products run at as many rows as there are episodes, and
each such step reads the keys and values of all episodes once, at the speed of copying memory. What the other model
wrote is read at the best batch size.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.decode import kv_shape
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.settings import EngineSettings
from tests.benchmarks.dreaming import NEVER, Shape, make_model, model_config
from tests.benchmarks.machine import attention_products, best_in_turns, copy_rate, products, products_seconds
from tests.benchmarks.measure import arguments, forward_operations, run_worker
from tests.benchmarks.table import Limit, table_row, write

_BATCHES = (64, 256, 1024, 4096)


def linear_shapes(config: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """``(out, in)`` of the products of all layers, joined where they share their input, and of the output head."""
    _, kv_heads, dim = kv_shape(config)
    hidden, mlp, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * mlp, hidden), (hidden, mlp)]
    return config.num_hidden_layers * layer, (config.vocab_size, hidden)


def token_seconds(config: Any, dtype: torch.dtype, seconds: float = 1.0) -> tuple[float, float]:
    """Seconds per token of all layers, and per logit row of the head, each at its best batch size."""
    body, head = linear_shapes(config)
    per_token = min(products_seconds(body, n, dtype, seconds) / n for n in _BATCHES)
    return per_token, min(products_seconds([head], n, dtype, seconds) / n for n in _BATCHES)


def dream_limits(shape: Shape, dtype: torch.dtype, seconds: float = 1.0) -> dict[str, Limit]:
    """Turns per second of the dreams of ``shape``: ``limit`` and ``decode_limit`` of a row. See the module."""
    per_token, per_logit = token_seconds(model_config(shape), dtype, seconds)
    turn = (shape.action + shape.observation) * (2 * per_token + per_logit)
    return {
        "limit": Limit(1 / turn, "tokens cost only their matrix products, at the best batch size of this machine"),
        "decode_limit": Limit(
            decode_turns(shape, dtype, (shape.turns + 1) / 2, seconds),
            f"sampled tokens come one by one: products at {shape.episodes} rows, and keys and values of all "
            "episodes read once a token at the speed of copying memory",
        ),
    }


def decode_turns(shape: Shape, dtype: torch.dtype, turn: float, seconds: float = 1.0) -> float:
    """Turns per second at the ``turn``-th turn, counted from 1, if only the second limit held."""
    config = model_config(shape)
    body, head = linear_shapes(config)
    per_token, per_logit = token_seconds(config, dtype, seconds)
    made = shape.action + shape.observation
    layers, heads, dim = kv_shape(config)
    length = shape.start + (turn - 0.5) * made
    cached = layers * 2 * heads * dim * dtype.itemsize * shape.episodes * length  # bytes, of one model
    step = products_seconds([*body, head], shape.episodes, dtype, seconds)
    step += cached / copy_rate(seconds)
    # the first token of a completion comes out of reading its prompt, the last one is read with the next prompt
    read_first = (made + 2) * per_token + 2 * per_logit
    return shape.episodes / ((made - 2) * step + shape.episodes * read_first)


def turn_operations(shape: Shape, turn: int) -> float:
    """Of the matrix products of both models for the ``turn``-th turn of an episode, counted from 1."""
    config = model_config(shape)
    made = shape.action + shape.observation
    before = range(shape.start + (turn - 1) * made)
    after = range(len(before) + made)
    return sum(
        forward_operations(config, [after], sampled) - forward_operations(config, [before], 0)
        for sampled in (shape.action, shape.observation)
    )


@dataclass(frozen=True)
class Side:
    """A competitor: an engine in the Python that has it; ``eager`` is for vLLM."""

    engine: str
    dtype: str = "float32"
    python: Path | str = sys.executable
    eager: bool = True


class Race:
    """Turns per second of several sides.

    Args:
        shape: of models and dreams.
        folder: for what processes exchange.
        threads: of torch, for all sides.
        device: of all sides, ``cpu`` or ``cuda``.

    Attributes:
        rates: turns per second of each side, dream by dream.
        missing: why a side has none.
        tried: turns per second of a side's ways to run, or why one does not.
    """

    def __init__(self, shape: Shape, folder: Path, threads: int, device: str = "cpu") -> None:
        self.shape, self.folder, self.threads, self.device = shape, folder, threads, device
        self.sides: dict[str, Side] = {}
        self.rates: dict[str, list[float]] = {}
        self.missing: dict[str, str] = {}
        self.tried: dict[str, dict[str, float | str]] = {}

    def enter(self, name: str, *ways: Side) -> None:
        """A side takes part; where it can run in several ways, in the one that a first dream shows to be fastest."""
        if not Path(ways[0].python).exists():
            self.missing[name] = f"{ways[0].python} is not there; the Makefile makes it"
            return
        found: dict[str, float | str] = {}
        speed: dict[Side, float] = {ways[0]: 0.0} if len(ways) == 1 else {}
        for way in ways if len(ways) > 1 else ():
            label = "eager" if way.eager else "compiled"
            try:
                speed[way] = found[label] = self._play(way)["turns/s"][0]
            except RuntimeError as error:  # compiling asks for more than running
                found[label] = self.missing[name] = _reason(error)
        if speed:
            self.missing.pop(name, None)
            self.sides[name], self.tried[name] = max(speed, key=lambda way: speed[way]), found

    def run(self, rounds: int) -> None:
        """Plays with each side, ``rounds`` times; who goes first changes.

        A side that vLLM cannot play is left out, and the reason kept.
        """
        for k in range(rounds):
            for name, side in list(self.sides.items())[:: 1 if k % 2 == 0 else -1]:
                try:
                    rates = self._play(side)["turns/s"]
                except RuntimeError as error:
                    if side.engine != "vllm":
                        raise
                    self.missing[name] = _reason(error)
                    del self.sides[name]
                    self.rates.pop(name, None)
                    continue
                self.rates.setdefault(name, []).extend(rates)
                print(f"{name}: {', '.join(f'{rate:.1f}' for rate in rates)} turns/s", flush=True)

    def row(self, what: str, target: str, ours: str, theirs: str, limits: dict[str, Any]) -> dict[str, Any]:
        """One side against another, by their names; ``limits`` come from ``dream_limits``."""
        mine, others = (self.rates.get(name, []) for name in (ours, theirs))
        return table_row(what, target, "turns/s", mine, others, not_measured=self.missing.get(theirs, ""), **limits)

    def long_row(
        self, name: str, target: str, episodes: int | None = None, seconds: float = 1.0, plays: int = 3
    ) -> dict[str, Any]:
        """Whether later turns of a side cost more, and in the note whether they must; another number of episodes than
        in the race shows how much of it is the reading of their keys and values. One play says little: a turn takes
        less than a second."""
        side = self.sides[name]
        shape = replace(self.shape, turns=31, episodes=episodes or self.shape.episodes)
        late, early = zip(*(self._play(side, shape=shape, long=True)["seconds"] for _ in range(plays)), strict=True)
        dtype = getattr(torch, side.dtype)
        least_late, least_early = (1 / decode_turns(shape, dtype, n, seconds) for n in (30, 3))
        operations = turn_operations(shape, 30) / turn_operations(shape, 3)
        return table_row(
            f"time of turn 30 over time of turn 3, {shape.episodes} episodes, {name}",
            target,
            "s a turn of all",
            late,
            early,
            note=f"turns that cost only what the second limit allows would have {least_late / least_early:.2f}, "
            f"by number of operations {operations:.2f}",
        )

    def _play(self, side: Side, shape: Shape | None = None, long: bool = False) -> dict[str, Any]:
        spec = {"engine": side.engine, "dtype": side.dtype, "eager": side.eager, "shape": asdict(shape or self.shape)}
        spec |= {"seeds": (0, 1), "long": long, "device": self.device}
        return run_worker(side.python, "dreaming", spec, self.folder, self.threads)


def _reason(error: Exception) -> str:
    """The line of a worker's last words that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error:" in line or "Unavailable:" in line]
    return (telling or lines)[-1][:300]


def decode_row(
    shape: Shape, dtype: torch.dtype, length: int = 64, seconds: float = 5.0, device: str = "cpu", graphs: bool = True
) -> dict[str, Any]:
    """Tokens per second of decoding all episodes at once, against the same matrix products alone: those of the linear
    layers and of attention. Both do ``length`` steps at a stretch, in turns. ``graphs``: of CUDA, see
    ``EngineSettings``."""
    model = make_model(shape, 0, dtype, device)
    engine = InProcessEngine(model, shape.context, EngineSettings(slots=shape.episodes, memory_gib=16.0, graphs=graphs))
    prompts = torch.randint(0, shape.vocab, (shape.episodes, min(200, shape.context - length - 1))).tolist()

    async def run(tokens: int) -> None:
        engine.update_weights()
        sampling = Sampling(tokens, NEVER)
        await asyncio.gather(*(engine.complete(ids, sampling, k, k) for k, ids in enumerate(prompts)))

    body, head = linear_shapes(model.config)
    layers, kv_heads, dim = kv_shape(model.config)
    heads, time = (shape.heads, kv_heads), len(prompts[0]) + length // 2
    with torch.device(device):
        linear = products([*body, head], shape.episodes, dtype)
        attention = attention_products(layers, shape.episodes, heads, time, dim, dtype, seconds / 5)

    def steps(*works: Callable[[], None]) -> None:
        for _ in range(length):
            for work in works:
                work()

    reading, both, alone = best_in_turns(
        [lambda: asyncio.run(run(1)), lambda: asyncio.run(run(1 + length)), lambda: steps(linear, attention)],
        6 * seconds,
    )
    decoded, rate = (shape.episodes * length / taken for taken in (both - reading, alone))
    limit = Limit(rate, f"matrix products at {shape.episodes} rows and nothing else")
    what = f"decode rate over that of all its matrix products alone{'' if graphs else ', without CUDA graphs'}"
    return table_row(what, ">= 0.5", "tokens/s", [decoded], [rate], limit=limit)


def main() -> None:
    parser = arguments(__doc__, "vllm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = Shape(episodes=8, turns=2) if options.quick else Shape()
    seconds = 0.1 if options.quick else 1.0
    race = Race(shape, options.out / "rollouts.work", options.threads)
    ours, half, generate = "in process, fp32", "in process, bf16", "generate, fp32"
    race.enter(ours, Side("inprocess"))
    race.enter(generate, Side("generate"))
    race.enter(half, Side("inprocess", "bfloat16"))
    for name, dtype in (("vLLM, fp32", "float32"), ("vLLM, bf16", "bfloat16")):
        ways = [Side("vllm", dtype, options.vllm_python, eager) for eager in (True, False)]
        race.enter(name, *(ways[:1] if options.quick else ways))
    race.run(1 if options.quick else options.rounds)
    fp32, bf16 = (dream_limits(shape, dtype, seconds=seconds) for dtype in (torch.float32, torch.bfloat16))
    rows = [
        race.row("dreamed turns/s against generate, whole history each turn", ">= 10", ours, generate, fp32),
        race.row("dreamed turns/s against vLLM", ">= 1.5", ours, "vLLM, fp32", fp32),
        race.row("dreamed turns/s against vLLM, both in bf16", "report", half, "vLLM, bf16", bf16),
    ]
    if not options.quick:
        rows += [race.long_row(name, "<= 1.5", seconds=seconds) for name in (ours, half)]
        rows += [race.long_row(name, "report", 8, seconds) for name in (ours, half)]
        rows += [race.long_row(generate, "report", 8, seconds, plays=1)]
        rows.append(decode_row(shape, torch.float32))
    write(
        "rollouts",
        rows,
        options,
        shape=asdict(shape),
        parameters=sum(p.numel() for p in make_model(shape, 0).parameters()),
        vllm_compiled={name: not side.eager for name, side in race.sides.items() if side.engine == "vllm"},
        vllm_turns_per_second_by_way=race.tried,
        copy_rate_gb_s=copy_rate(seconds=seconds) / 1e9,
    )


if __name__ == "__main__":
    main()
