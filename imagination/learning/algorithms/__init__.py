"""The family of masked multi-turn algorithms, by name and in parts. How to add one: README.md in this folder."""

from imagination.learning.algorithms.algorithm import Algorithm, total
from imagination.learning.algorithms.episodes import Episodes, Judged, Rewards, rewards_of
from imagination.learning.algorithms.registry import ALGORITHMS, algorithm
from imagination.learning.algorithms.surrogate import Tokens

__all__ = ["ALGORITHMS", "Algorithm", "Episodes", "Judged", "Rewards", "Tokens", "algorithm", "rewards_of", "total"]
