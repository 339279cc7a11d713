"""Where logs come from: games and scripted agents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GamesSettings:
    """Which TextWorld games to generate. Every seed of a run has its own games.

    Attributes:
        train: games to log, dream and be judged in.
        heldout: games that nothing is trained on.
        rooms: of a game.
        objects: of a game, those of no use included.
        quest_length: commands that solve a game at best; the goal names only the last.
    """

    train: int = 6
    heldout: int = 6
    rooms: int = 3
    objects: int = 5
    quest_length: int = 5


@dataclass
class CollectSettings:
    """The log: scripted agents of many skills in the real games.

    Attributes:
        episodes: per training game.
        heldout_episodes: per held-out game, only to measure the world model there.
        max_turns: at which a logged episode is cut.
        validation: share of the episodes of training games that no model trains on.
        workers: processes that play real games, for every stage.
    """

    episodes: int = 800
    heldout_episodes: int = 10
    max_turns: int = 12
    validation: float = 0.05
    workers: int = 4
