"""Who plays: this process, or players on many machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imagination.settings.schema import require


@dataclass
class ScaleSettings:
    """Players of episodes beside the process that learns, as actors of Ray."""

    name: Literal["none", "ray"] = "none"  #: scale=ray starts players; none plays in this process
    #: of a running cluster, such as 10.0.0.1:6379; empty takes RAY_ADDRESS, or starts a cluster on this machine
    address: str = ""
    players: int = 2  #: actors with a policy and a world model each
    cpus_per_player: float = 1.0  #: cores that a player takes from the cluster
    gpus_per_player: float = 0.0  #: GPUs that a player takes from the cluster; 0.5 puts two on one
    gb_per_player: float = 0.0  #: memory that a player takes from the cluster, in 1e9 bytes; 0 reserves none
    real_worlds: int = 1  #: actors that hold real environments, collect.workers processes each
    cpus_per_real_world: float = 1.0  #: cores that such an actor takes from the cluster
    gb_per_real_world: float = 0.0  #: memory that such an actor takes from the cluster, in 1e9 bytes; 0 reserves none
    start_seconds: float = 600.0  #: until a player must have loaded its first weights
    hang_seconds: float = 600.0  #: until a player must have played a group; then it is replaced
    attempts: int = 3  #: players that a group may lose before it counts as failed

    def __post_init__(self) -> None:
        require(self, "1 or more", "players", "attempts", "real_worlds")
        require(self, "above 0", "start_seconds", "hang_seconds")
        require(self, "0 or more", "cpus_per_player", "gpus_per_player", "gb_per_player")
        require(self, "0 or more", "cpus_per_real_world", "gb_per_real_world")
