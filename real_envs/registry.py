"""Worlds by name: those of this package, and those that installed packages add as entry points.

A package adds one in its ``pyproject.toml``, without touching this tree::

    [project.entry-points."imagination.envs"]
    my_world = "my_package.world:MyWorld"

``MyWorld()`` then is what ``env=my_world`` plays; see ``real_envs.world.World``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from real_envs.errors import UserError
from real_envs.world import World

GROUP = "imagination.envs"
BUILT_IN = {
    "agentgym": "real_envs.agentgym:AgentGym",
    "alfworld": "real_envs.alfworld:Alfworld",
    "browsergym": "real_envs.browsergym_suites:BrowserGym",
    "gymnasium": "real_envs.gymnasium_text:GymnasiumText",
    "miniwob": "real_envs.miniwob:Miniwob",
    "openenv": "real_envs.openenv:OpenEnv",
    "scienceworld": "real_envs.scienceworld:ScienceWorld",
    "textworld": "real_envs.textworld:TextWorld",
    "textworld_express": "real_envs.textworld_express:TextWorldExpress",
}


class UnknownWorld(UserError):
    """There is no world of that name, or what it needs is not installed. The message says what to do."""


def world_names() -> list[str]:
    """The names that ``env=`` takes."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def find_world(name: str) -> World:
    """The world of that name. A built-in one comes before an entry point of the same name.

    Raises:
        UnknownWorld: no such world, or its module cannot be imported.
    """
    target = BUILT_IN.get(name) or next((e.value for e in entry_points(group=GROUP) if e.name == name), None)
    if target is None:
        raise UnknownWorld(
            f"there is no environment '{name}'; known are {', '.join(world_names())}. "
            f"A package adds one through the entry point '{GROUP}'"
        )
    module, _, attribute = target.partition(":")
    try:
        made: World = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise UnknownWorld(f"env={name} cannot be played: {error}") from error
    return made
