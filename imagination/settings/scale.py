"""Who plays: this process, or players on many machines; and what that is simulated with."""

from __future__ import annotations

from dataclasses import dataclass, field
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

    def real_processes(self, workers: int) -> int:
        """Processes of real environments, ``workers`` in each place that has any."""
        return workers * (1 if self.name == "none" else self.real_worlds)


@dataclass
class ScaleSimSettings:
    """A training with players on a simulated clock."""

    #: folder of a trained run: its dreams give the lengths of episodes, its times a machine of its own. Empty takes the
    #: lengths of dreams of the demo
    from_run: str = ""
    #: of a sweep, each four times as many as those before it or fewer
    players: list[int] = field(default_factory=lambda: [4**k for k in range(7)])
    parameters: list[float] = field(default_factory=lambda: [0.1, 1.0, 8.0, 70.0])  #: of policy and world model, in 1e9
    links: list[float] = field(default_factory=lambda: [10.0, 400.0, 7200.0])  #: of each machine, in Gbit/s
    max_staleness: list[int] = field(default_factory=lambda: [0, 1, 4, 8])  #: 0 is synchronous
    updates: int = 8  #: that are measured, after the first ones
    groups: int = 512  #: of an update
    group_size: int = 8  #: episodes of a group
    slots: int = 256  #: episodes that a player plays at once
    spread: float = 0.1  #: of the pace of groups and of sending: deviation of the logarithm
    action_tokens: float = 2.2  #: of a turn
    observation_tokens: float = 22.2  #: of a turn
    start_tokens: float = 68.9  #: of an episode
    machine_gpus: int = 8  #: which share a copy of the weights
    learner_gpus: int = 8  #: at least; more where the training state needs them
    learner_share: float = 1.0  #: GPUs that learn for each one that plays; 0 keeps learner_gpus
    gpu_tflops: float = 989.0  #: of products in bf16
    gpu_gb_per_second: float = 4800.0  #: of reading its memory
    gpu_gb: float = 141.0  #: its memory
    gpu_price: float = 3.0  #: of an hour
    learn_utilisation: float = 0.35  #: of gpu_tflops, while learning
    sample_utilisation: float = 0.5  #: of gpu_tflops and of gpu_gb_per_second, while sampling
    step_seconds: float = 0.003  #: that a decoding step takes at least
    read_seconds: float = 0.06  #: that a step that reads prompts takes at least
    read_steps: float = 2.0  #: such steps of a turn: 2 where episodes stay together, one a token where they do not
    weight_bytes: float = 4.0  #: of a parameter that is sent; policy.dtype=bfloat16 sends 2
    publish_gb_per_second: float = 0.45  #: of hashing the weights and copying them into the store
    group_seconds: float = 0.001  #: of the learner's process, to take in the result of a group
    turn_bytes: float = 592.0  #: of an episode on its way to the learner
    turn_seconds: float = 3.5e-6  #: of the learner's process, to make a turn of those bytes

    def __post_init__(self) -> None:
        require(self, "1 or more", "updates", "groups", "group_size", "slots", "machine_gpus", "learner_gpus")
        require(self, "above 0", "gpu_tflops", "gpu_gb_per_second", "gpu_gb", "publish_gb_per_second")
        require(self, "above 0", "learn_utilisation", "sample_utilisation")
        if min(self.players, default=0) < 1 or min([*self.parameters, *self.links], default=0) <= 0:
            raise ValueError("players must be 1 or more, parameters and links above 0, and none of them empty")
        if min(self.max_staleness, default=-1) < 0:
            raise ValueError("max_staleness must be 0 or more, and not empty")
