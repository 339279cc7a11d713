"""A world model that is a Python function, and the files in which it lies."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from policy.lm.engine import Engine
from real_envs.errors import UserError
from real_envs.files import read_json, read_text, write_atomically, write_json
from real_envs.trajectory import Trajectory, Turn
from worldmodel.code.worker import StepWorker
from worldmodel.world_model import Prediction

SOURCE, SCORE = "world.py", "world.json"


class CodeWorldModel:
    """Answers by ``step(start, history, action)`` of its source, which runs confined (``worker.py``).

    One answer is all it has: it samples nothing, its temperature is 0, and it is as sure as can be of whatever it says.
    A map to how often it is right is fitted as for every world model (``calibration.json``).

    World models as programs: WorldCoder (Tang, Key and Ellis 2024, arXiv 2402.12275); written and repaired by tests as
    in Agent2World.
    """

    engines: tuple[Engine, ...] = ()
    temperature = 0.0

    def __init__(self, source: str, seconds: float = 2.0, megabytes: int = 512) -> None:
        self.source, self.version = source, hashlib.sha256(source.encode()).hexdigest()[:12]
        self.seconds = seconds
        self._worker = StepWorker(source, seconds, megabytes)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        """
        Raises:
            PredictionInvalid: the function raised an error, took too long, ended its process, or returned another type.
            EngineUnavailable: the process cannot be confined.
        """
        # in no thread: an engine would step meanwhile, with those that have their answers, and round by who they are
        outcome = self._worker.call(start, history, action)
        return Prediction(*outcome, confidence=1.0, outcome_confidence=1.0)

    def release(self, session: object) -> None: ...

    def at_temperature(self, temperature: float) -> CodeWorldModel:
        return self

    def excluding(self, episodes: Sequence[Trajectory]) -> CodeWorldModel:
        return self

    def close(self) -> None:
        self._worker.close()


def save_world(source: str, score: Mapping[str, Any], folder: Path) -> None:
    """``world.py`` as it was written here, and ``world.json`` with its score and what shows that it was."""
    write_atomically(folder / SOURCE, source)
    write_json(folder / SCORE, {**score, "signature": _signature(source)})


def load_world(folder: Path, trust: bool, seconds: float, megabytes: int) -> CodeWorldModel:
    """Raises ``UserError``: the code was not written by this user on this machine, and ``trust`` does not allow it."""
    source = read_text(folder / SOURCE)
    if not trust:
        path = folder / SCORE
        signature = str(read_json(path).get("signature", "")) if path.exists() else ""
        if not hmac.compare_digest(signature.encode(), _signature(source).encode()):
            raise UserError(
                f"{folder / SOURCE} is code that `imagine fit-world-model` has not written here, and dreams would run "
                "it: read it, then add worldmodel.code.trust=true to the command"
            )
    return CodeWorldModel(source, seconds, megabytes)


def _signature(source: str) -> str:
    """By a key that no run folder holds: a checksum beside the code could be forged with it.

    Raises:
        UserError: there can be no key.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "imagination" / "code.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(secrets.token_hex(32))
        key = path.read_bytes()
    except OSError as error:
        raise UserError(f"worldmodel.kind=code keeps a key in {path}: {error}; set XDG_STATE_HOME") from error
    return hmac.new(key, source.encode(), hashlib.sha256).hexdigest()
