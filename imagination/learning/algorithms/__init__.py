"""The family of masked multi-turn algorithms, by name and in parts. How to add one: README.md in this folder."""

from imagination.learning.algorithms.advantage import Advantages, Episodes
from imagination.learning.algorithms.registry import ALGORITHMS, Algorithm, build_algorithm, total

__all__ = ["ALGORITHMS", "Advantages", "Algorithm", "Episodes", "build_algorithm", "total"]
