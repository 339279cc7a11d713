"""The Gymnasium id ``imagination/Dream-v0``: the dreams of a run, in this process.

``pip install 'imagination[gymnasium]'``. The part before the colon makes Gymnasium import this module, which registers
the id.

Example::

    import gymnasium

    env = gymnasium.make("imagination.gym:imagination/Dream-v0", run="outputs/mine")
    text, info = env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step("go east")
    info["trusted"], info["confidence"]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import gymnasium
except ImportError as error:
    raise ImportError(f"{error}; run `pip install 'imagination[gymnasium]'`") from error

if TYPE_CHECKING:
    from imagination.serving.gymnasium_env import DreamGym

ID = "imagination/Dream-v0"


def make_dream(run: str | Path, overrides: Sequence[str] = ()) -> DreamGym:
    """An environment in the dreams of a run.

    Args:
        run: its folder.
        overrides: settings as on the command line, such as ``["dream.temperature=0"]``.

    Raises:
        UserError: it is no run, or its world model is not fitted.
    """
    from imagination.commands.serve import open_world
    from imagination.runs.lifecycle import need
    from imagination.serving.gymnasium_env import DreamGym
    from imagination.settings import Config, compose

    folder = need(Path(run), "fit-world-model").resolve()
    words = [f"run={folder.name}", compose.override("output", str(folder.parent)), *overrides]
    config = compose.resolve(words, Config).config
    return DreamGym(open_world(config, folder), config.serve)


gymnasium.register(ID, entry_point=f"{__name__}:make_dream")
