"""Logged episodes on disk: the format ``imagination-trajectories``, version 1, and the class that reads and writes it.

A store is a folder of Parquet shards and one ``manifest.json``. It only grows: a shard is never changed, and the
manifest is replaced last and atomically, so that it names complete shards only. Files that it does not name are left
over from a crash; nobody reads them and the next append may overwrite them. One writer at a time. Example::

    {"format": "imagination-trajectories", "version": 1,
     "splits": {"train": ["tw-7", "tw-8"], "test": ["tw-9"]},
     "shards": [{"file": "shard-00000.parquet", "episodes": 128, "turns": 1403, "bytes": 90210, "sha256": "5f1d..."}],
     "meta": {"benchmark": "textworld", "commit": "d283f0a"}}

All five keys are there and no others; whatever is yours goes into ``meta``. ``splits`` maps a name to task ids; no task
is in two splits. ``shards`` are in reading order; ``file`` is a name without a folder, ``bytes`` the file's size and
``sha256`` the hex digest of its content.

A shard (any compression; ours is zstd) has one row an episode and these columns; further ones are ignored. What is
marked ``?`` may be null. Nothing is encoded inside a string, and a null is never a zero::

    id, task_id, group_id, agent, start   string   ids are unique in the store, task_id is in one of the splits
    source                                string   real | dream | expert
    stop                                  string   a value of StopReason: terminated, turn_limit, env_crashed, ...
    seed, prefix_turns                    int64
    turns     list<struct<action: string, observation: string, reward: double?, terminated: bool,
                          info: list<struct<key: string, number: double?, text: string?, flag: bool?>>?>>
              the observation is seen after the action; a reward is finite, and null where nobody measured it; an entry
              of info has exactly one of its three values
    policy_version?, world_model_version?, failure?   string
    trace?    struct<ids: list<int64>, owners: list<int64>, logprobs: list<double?>, turns: list<int64>,
                     temperature: double, top_p: double?, top_k: int64?>
              one entry a token, see ``Trace``; owners: 0 scaffold, 1 agent, 2 env; without the last two nothing was cut
    world_facts?   list<string>           of the task's initial state, for the world model; the column may be missing
    success?       bool                   whether the task was solved, where known; the column may be missing

``screens/`` beside the shards holds pictures that turns name in ``info`` (``real_envs.screens``); it may be missing.

An episode without turns is fine where the environment failed at reset. A log in which no episode has an action teaches
nobody anything, and ``read`` refuses it. An empty action is an agent's mistake: it is kept, but counts as none here.
"""

from real_envs.store.shards import MANIFEST, StoreError
from real_envs.store.trajectory_store import Staging, Summary, Tally, TrajectoryStore, Writer, is_validation

__all__ = ["MANIFEST", "Staging", "StoreError", "Summary", "Tally", "TrajectoryStore", "Writer", "is_validation"]
