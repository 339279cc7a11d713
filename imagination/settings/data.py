"""Where logs come from: games and scripted agents."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EnvSettings:
    """The real world; env=textworld_express is short for all of it.

    Attributes:
        name: of the world, such as textworld; packages add their own (entry point imagination.envs).
        price: of a real step, in whatever money; 0 is none. It changes what the report says and nothing else.
        options: what is particular to that world, such as env.options.game=twc; see its file in configs/env/.
    """

    name: str = "textworld"
    price: float = 0.0
    options: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass
class GamesSettings:
    """How many tasks (games) to generate. Every seed of a run has its own.

    Attributes:
        train: games to log, dream and be judged in.
        heldout: games that nothing is trained on.
        rooms: of a TextWorld game.
        objects: of a TextWorld game, those of no use included.
        quest_length: commands that solve a TextWorld game at best; the goal names only the last.
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
