"""What a base model reads: many worlds, each at its share."""

from __future__ import annotations

from dataclasses import dataclass, field

from imagination.settings.models import FitSettings
from policy.lm.settings import ModelSettings

Option = str | int | float | bool | list[str] | list[int]


@dataclass
class CorpusWorld:
    """A world of the corpus. Its options are drawn anew for every few tasks.

    Attributes:
        env: the world, as in env=.
        share: of the corpus, beside the shares of the other worlds.
        options: as env.options; a list is one of its values, 2..11 a number from 2 to 11, alone or within a text.
        tasks: training tasks that are played with the same options.
        episodes: of each task.
        max_turns: at which an episode is cut.
        facts: facts of the task that the world model reads in half of the episodes, at most; 0 is none.
    """

    env: str
    share: float = 1.0
    options: dict[str, Option] = field(default_factory=dict)
    tasks: int = 8
    episodes: int = 4
    max_turns: int = 24
    facts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share must be 0 or more, got {self.share}")
        if self.tasks < 1 or self.episodes < 1 or self.max_turns < 1 or self.facts < 0:
            raise ValueError("tasks, episodes and max_turns must be at least 1, and facts 0 or more")


@dataclass
class PretrainSettings(FitSettings):
    """Pretraining of a base model on endless episodes of many worlds, in the views of world model and policy.

    Attributes:
        worlds: by a name; preset=base has them.
        shard_characters: text that is played at a time; it is trained on and then forgotten.
        passes: how often each shard is trained on, where playing is slower than training.
        minutes: from the first step, after which training ends, with the rate falling towards that end; 0 ends it after
            its steps alone.
        makers: processes that play the next shards meanwhile.
        agents: whose episodes the policy's view imitates, by the beginning of their names.
        renamed_share: of the episodes, told with made-up names.
        save_every: steps between two training states, from which a stopped run goes on.
        model: its sizes.
    """

    worlds: dict[str, CorpusWorld] = field(default_factory=dict)
    shard_characters: int = 800_000
    passes: int = 1
    minutes: float = 0.0
    makers: int = 1
    agents: list[str] = field(default_factory=lambda: ["expert", "noisy-0.2"])
    renamed_share: float = 0.5
    save_every: int = 200
    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        FitSettings.__post_init__(self)
        if min(self.shard_characters, self.passes, self.makers, self.save_every) < 1 or self.minutes < 0:
            raise ValueError(
                "shard_characters, passes, makers and save_every must be at least 1, and minutes 0 or more"
            )
        if not 0 <= self.renamed_share <= 1:
            raise ValueError(f"renamed_share must lie in [0, 1], got {self.renamed_share}")
