"""The family of masked multi-turn algorithms, by name and in parts. How to add one: README.md in this folder."""

from imagination.algorithms.algorithm import Algorithm, total
from imagination.algorithms.episodes import Episodes, Judged, Rewards, rewards_of
from imagination.algorithms.registry import ALGORITHMS, algorithm
from imagination.algorithms.surrogate import Tokens

__all__ = ["ALGORITHMS", "Algorithm", "Episodes", "Judged", "Rewards", "Tokens", "algorithm", "rewards_of", "total"]
