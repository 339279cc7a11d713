"""What tells a false turn of a dream without a simulator? Signals behind one protocol, and how well each tells.

Each is judged on turns whose truth is known. Of a dream whose actions were replayed in the real world, the first turn
that the world answered differently is false, and those before it are true; later ones are not judged, as the two
worlds are then in different states. Of answers to logged actions, given the real history, all are judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from policy.lm.batch import padded
from policy.lm.forward import encode, evaluating, micro_batches
from policy.lm.render import ChatFormat
from real_envs.seeding import derive_seed
from real_envs.trajectory import Owner, Trajectory, Turn
from worldmodel.evaluation.dreams import contradictions_of
from worldmodel.evaluation.intervals import RESAMPLES, Estimate, clusters, interval_of
from worldmodel.evaluation.transitions import Judged, token_f1
from worldmodel.formats.full import TransitionFormat, episode_tokens
from worldmodel.formats.retrieval import TransitionIndex
from worldmodel.rules.rule_set import RuleSet

_WORDS = re.compile(r"\w+|[^\w\s]")
_NGRAM = 3  # words
_NEIGHBOURS = 8  # logged transitions like the turn's, of which the nearest answer counts
_UNSURE = 1e-9  # least probability, so that its logarithm is finite


@dataclass(frozen=True, slots=True)
class DreamedTurn:
    """A turn of a dream, what stood before it, and whether the real world answered otherwise."""

    dream: Trajectory
    index: int
    false: bool

    @property
    def turn(self) -> Turn:
        return self.dream.turns[self.index]

    @property
    def history(self) -> Sequence[Turn]:
        return self.dream.turns[: self.index]


def upto(episode: Trajectory, index: int, turn: Turn) -> Trajectory:
    """The episode up to a turn, which is put in place of its own, as a dream that begins there."""
    turns = (*episode.turns[:index], turn)
    return replace(episode, id=f"{episode.id}/{index}", turns=turns, prefix_turns=index, trace=None)


def answered(episode: Trajectory, judged: Judged) -> Trajectory:
    """The episode up to a turn, as the world model answered it.

    Raises:
        ValueError: it wrote nothing that could be read.
    """
    p = judged.predicted
    if p is None:
        raise ValueError(f"turn {judged.index} of {episode.id} has no answer")
    return upto(episode, judged.index, Turn(judged.turn.action, p.observation, p.reward, p.terminated, p.record()))


class Signal(Protocol):
    """``name`` for tables, and for each turn a number that is the higher the likelier the turn is false; ``None`` where
    the signal says nothing of it."""

    name: str

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]: ...


class Recorded:
    """A number that the world model gave with its answer, such as ``confidence``; ``sure``: whether high is sure."""

    def __init__(self, name: str, key: str, sure: bool = True) -> None:
        self.name, self._key, self._sure = name, key, sure

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        values = (t.turn.info.get(self._key) for t in turns)
        return [self._score(value) if isinstance(value, float) else None for value in values]

    def _score(self, value: float) -> float:
        return -math.log(max(value, _UNSURE)) if self._sure else value


class Support:
    """Share of the word trigrams of action and answer that stand nowhere in the log."""

    name = "n-gram support"

    def __init__(self, log: Sequence[Trajectory]) -> None:
        texts = {_text(turn) for trajectory in log for turn in trajectory.turns}
        self._known = {gram for text in texts for gram in _ngrams(text)}

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        grams = [_ngrams(_text(t.turn)) for t in turns]
        return [sum(gram not in self._known for gram in some) / len(some) for some in grams]


class Nearest:
    """How far the answer is from that of the nearest of the logged transitions most like this one: 1 - token F1."""

    name = "nearest transition"

    def __init__(self, index: TransitionIndex) -> None:
        self._index = index

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        return [self._score(t) for t in turns]

    def _score(self, t: DreamedTurn) -> float:
        seen = t.history[-1].observation if t.history else t.dream.start
        like = self._index.similar(t.dream.start, seen, t.turn.action, _NEIGHBOURS, frozenset())
        return 1.0 - max((token_f1(t.turn.observation, n.turn.observation) for n in like), default=0.0)


class Violations:
    """1 where the turn contradicts what rules foretell of it, breaks an invariant, or is accepted when tried again."""

    name = "rule violations"

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        dreams = {t.dream.id: t.dream for t in turns}
        contradictions = {name: contradictions_of(dream, self._rules) for name, dream in dreams.items()}
        own = ((contradictions[t.dream.id], t.index - t.dream.prefix_turns) for t in turns)
        # a turn that the guard rejected is in no list
        return [float(kinds[k] is not None) if k < len(kinds) else None for kinds, k in own]


def _text(turn: Turn) -> str:
    return f"> {turn.action}\n{turn.observation}"


def _ngrams(text: str) -> list[tuple[str, ...]]:
    words = _WORDS.findall(text.lower())
    return [tuple(words[k : k + _NGRAM]) for k in range(max(1, len(words) - _NGRAM + 1))]


def judge_signals(signals: Sequence[Signal], turns: Sequence[DreamedTurn], seed: int) -> list[dict[str, Any]]:
    """How well each signal tells the false turns: ``auroc`` and ``average_precision`` (bootstrap over tasks) a signal.

    ``n`` are the turns of which the signal says something, ``false`` of them; chance has a precision of their ratio.
    """
    rows = []
    for signal in signals:
        scored = [(s, t) for s, t in zip(signal.scores(turns), turns, strict=True) if s is not None]
        labels = [t.false for _, t in scored]
        groups = clusters([t.dream.task_id for _, t in scored], [t.dream.id for _, t in scored])
        scores = [s for s, _ in scored]
        rows.append({"name": signal.name, "n": len(scored), "false": sum(labels)})
        for name, measure in (("auroc", auroc), ("average_precision", average_precision)):
            rows[-1][name] = _estimate(measure, scores, labels, groups, seed).to_json()
    return rows


Measure = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def auroc(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area under the ROC curve: how often a positive scores above a negative, a tie counting half.

    Mann and Whitney, Annals of Mathematical Statistics 18 (1947) 50-60. Both arguments are ``[..., scores]``, how many
    there are at each distinct score, from the lowest one up; nan where there are none of a kind.
    """
    below = np.cumsum(negative, -1) - negative / 2
    return np.asarray((positive * below).sum(-1) / (positive.sum(-1) * negative.sum(-1)))


def average_precision(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> NDArray[np.float64]:
    """``sum_k (R_k - R_{k-1}) P_k`` over thresholds from the highest score down; arguments as for ``auroc``."""
    hits, all_ = (np.cumsum(x[..., ::-1], -1) for x in (positive, positive + negative))
    precision = hits / np.maximum(all_, 1e-12)
    return np.asarray((precision * positive[..., ::-1]).sum(-1) / positive.sum(-1))


def _estimate(
    measure: Measure, scores: Sequence[float], labels: Sequence[bool], groups: Sequence[str], seed: int
) -> Estimate:
    """The measure, and its interval over clusters drawn with replacement."""
    if not any(labels) or all(labels):
        return Estimate(None, len(scores))
    _, at = np.unique(scores, return_inverse=True)
    _, cluster = np.unique(groups, return_inverse=True)
    counts = np.zeros((2, cluster.max() + 1, at.max() + 1))
    np.add.at(counts, (np.asarray(labels, int), cluster, at), 1.0)
    value = float(measure(counts[1].sum(0), counts[0].sum(0)))
    many = counts.shape[1]
    rng = np.random.default_rng(derive_seed("signals", seed))
    drawn = rng.multinomial(many, [1 / many] * many, size=RESAMPLES).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = measure(drawn @ counts[1], drawn @ counts[0])
    return Estimate(value, len(scores), interval_of(values[np.isfinite(values)].tolist(), many, (0.0, 1.0)))


_PENALTY = 0.01  # weight of the squared weights
_STEPS = 200  # of LBFGS at most
_MICRO_TOKENS = 4096


class AnswerStates:
    """What a language model makes of an answer: its hidden state after it, and the mean over the answer's tokens."""

    def __init__(self, model: Any, chat: ChatFormat, form: TransitionFormat) -> None:
        self._model, self._chat, self._form = model, chat, form

    @torch.no_grad()
    def __call__(self, episodes: Sequence[Trajectory]) -> Tensor:
        """``[episodes, 2 hidden]``, of the last turn of each, given those before it."""
        tokens = [episode_tokens(self._chat, episode, self._form) for episode in episodes]
        device = next(self._model.parameters()).device
        states_of: dict[int, Tensor] = {}
        with evaluating(self._model):
            for micro in micro_batches(self._model, [t.ids for t in tokens], _MICRO_TOKENS):
                ids = padded([tokens[i].ids for i in micro], 0, torch.long).to(device)
                mask = padded([[1.0] * len(tokens[i].ids) for i in micro], 0, torch.long).to(device)
                encoded = encode(self._model, ids, mask)
                for row, i in enumerate(micro):
                    last = len(episodes[i].turns) - 1
                    owners = zip(tokens[i].owners, tokens[i].turns, strict=True)
                    own = [at for at, (owner, turn) in enumerate(owners) if owner == Owner.ENV and turn == last]
                    states = encoded.states[encoded.which[row, own]].float().cpu()
                    states_of[i] = torch.cat([states[-1], states.mean(0)])
        return torch.stack([states_of[i] for i in range(len(tokens))])


class Discriminator:
    """The log-odds, by logistic regression on ``AnswerStates``, that the world model made an answer up. See ``fit``."""

    name = "discriminator head"

    def __init__(self, states: AnswerStates, centre: Tensor, spread: Tensor, weight: Tensor) -> None:
        self._states, self._centre, self._spread, self._weight = states, centre, spread, weight

    @classmethod
    def fit(cls, states: AnswerStates, log: Sequence[Trajectory], judged: Sequence[Judged]) -> Discriminator | None:
        """Learns from answers that the model sampled, beside what the log says; ``None`` where all of them are right.

        Args:
            log: episodes that the world model was not trained on, for of those it knows the answers.
            judged: its own answers to their actions, sampled without rules (``transitions.judge``).
        """
        by_id = {t.id: t for t in log}
        wrong = [
            (upto(by_id[j.trajectory_id], j.index, j.turn), answered(by_id[j.trajectory_id], j))
            for j in judged
            if j.predicted is not None and not j.exact
        ]
        if not wrong:
            return None
        read = states([episode for pair in wrong for episode in pair])
        labels = torch.tensor([0.0, 1.0]).repeat(len(wrong))
        centre, spread = read.mean(0), read.std(0).clamp(min=1e-6)
        return cls(states, centre, spread, _logistic((read - centre) / spread, labels))

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        if not turns:
            return []
        read = self._states([upto(t.dream, t.index, t.turn) for t in turns])
        return list(_with_bias((read - self._centre) / self._spread).matmul(self._weight).tolist())


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _logistic(x: Tensor, labels: Tensor) -> Tensor:
    """Weights, the bias last, of a logistic regression with a squared penalty."""
    x = _with_bias(x)
    weight = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(x @ weight, labels) + _PENALTY * weight[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach()
