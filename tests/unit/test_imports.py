"""Imports go one way. If this fails, a package can no longer be used, tested or installed without the ones above it.

The files are read with `ast`, so a lazy import inside a function counts too, and so does `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("real_envs", "policy", "worldmodel", "imagination")

# What of ours each package may import besides itself.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "real_envs": (),
    "policy": ("real_envs",),
    "worldmodel": ("real_envs", "policy.lm"),
    "imagination": ("real_envs", "policy", "worldmodel"),
}

# The only places of a library that we want to be able to replace, or to do without. A name that ends in / is a folder.
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "vllm": ("policy/lm/engines/vllm.py",),
    "httpx": ("policy/lm/engines/openai.py", "real_envs/worlds/servers/agentgym.py", "real_envs/chat_server.py"),
    "ray": ("imagination/scale/",),
    "simpy": ("imagination/scale/simulation.py",),
    "openenv": ("real_envs/worlds/servers/openenv.py",),
    "diffusers": ("worldmodel/diffusion/sampling.py", "worldmodel/extras/"),
    "lightning": ("imagination/learning/", "imagination/evaluation/monitors/monitor.py"),
    "hydra": ("imagination/settings/compose.py", "imagination/cli.py"),
    "omegaconf": ("imagination/settings/compose.py", "imagination/cli.py"),
    "torch": ("policy/", "worldmodel/", "imagination/"),
    **dict.fromkeys(("mcp", "mcp_types"), ("imagination/serving/mcp.py", "real_envs/worlds/servers/mcp.py")),
    **dict.fromkeys(("httpx2", "anyio"), ("real_envs/worlds/servers/mcp.py",)),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), ("imagination/serving/",)),
}
# The rooms of imagination, from the ground up: each may import those before it, and none after it.
ROOMS = "settings runs rollout data session scale evaluation learning loop report serving commands".split()  # noqa: SIM905
# Other names under which the same library comes.
ALIASES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def imported(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of each import: `from policy import lm` is `policy.lm`; relative ones are resolved."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def above(module: str, name: str) -> bool:
    """Whether ``name`` is in a room above that of ``module``."""
    rooms = [ROOMS.index(m.split(".")[1]) for m in (module, name) if m.count(".") and m.split(".")[1] in ROOMS]
    return len(rooms) == 2 and rooms[1] > rooms[0]


def violations(root: Path) -> list[str]:
    """Every breach of the rules in the tree below ``root``, as `file:line what`."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            if path.name == "utils.py":
                found.append(f"{file}:1 name it after what it does")
            for line, name in imported(path, module):
                top = name.partition(".")[0]
                if top in PACKAGES and top != package and not any(within(name, ok) for ok in MAY_IMPORT[package]):
                    found.append(f"{file}:{line} {package} must not import {name}")
                if top == package == "imagination" and above(module, name):
                    found.append(f"{file}:{line} {module.split('.')[1]} must not import {name}, which is above it")
                places = ONLY_IN.get(ALIASES.get(top, top))
                if places and not any(
                    file == place or (place[-1] == "/" and file.startswith(place)) for place in places
                ):
                    found.append(f"{file}:{line} {top} belongs only in {', '.join(places)}")
    return found


def test_imports_go_one_way() -> None:
    assert violations(ROOT) == []


def test_world_models_do_not_import_what_judges_them() -> None:
    """``worldmodel.evaluation`` reads predictions and calibrations; a kind of world model knows nothing of it."""
    upwards = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in (ROOT / "worldmodel").glob("*.py")
        for line, name in imported(path, f"worldmodel.{path.stem}")
        if name.startswith("worldmodel.evaluation")
    ]
    assert upwards == []


def test_no_test_leans_on_another_test() -> None:
    """What tests share lies in tests/support: a test that moves or goes must not take another one with it."""
    tests = ROOT / "tests"
    test_modules = {path.stem for path in tests.rglob("test_*.py")} | {"conftest"}
    leaning = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in tests.rglob("*.py")
        for line, name in imported(path, ".".join(path.relative_to(ROOT).with_suffix("").parts))
        if name.startswith("tests.") and test_modules & set(name.split("."))
    ]
    assert len(test_modules) > 100
    assert leaning == []


def test_the_packages_are_really_read() -> None:
    read = {path.parts[len(ROOT.parts)] for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert read == set(PACKAGES)
    assert (3, "real_envs.env.Env") not in imported(ROOT / "real_envs/env.py", "real_envs.env")
    names = [name for _, name in imported(ROOT / "real_envs/env.py", "real_envs.env")]
    assert "real_envs.trajectory.Observation" in names


def planted(root: Path, file: str, source: str) -> list[str]:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return violations(root)


@pytest.mark.parametrize(
    ("file", "source", "tokens"),
    [
        ("real_envs/a.py", "import policy", "real_envs policy"),
        ("real_envs/deep/a.py", "from worldmodel.text import T", "real_envs worldmodel.text.T"),
        ("real_envs/a.py", "def f():\n    import torch", "torch only"),
        ("policy/a.py", "from imagination import rollout", "policy imagination.rollout"),
        ("policy/lm/a.py", "import worldmodel.text", "policy worldmodel.text"),
        ("worldmodel/a.py", "from policy.agent import Agent", "worldmodel policy.agent.Agent"),
        ("worldmodel/a.py", "from policy import lmx", "worldmodel policy.lmx"),
        ("worldmodel/a.py", "import policy", "worldmodel policy"),
        ("worldmodel/a.py", "import importlib\nimportlib.import_module('imagination')", "worldmodel imagination"),
        ("policy/lm/engine.py", "if TYPE_CHECKING:\n    import vllm", "vllm only policy/lm/engines/vllm.py"),
        ("imagination/losses.py", "from lightning.pytorch import Trainer", "lightning only"),
        ("imagination/losses.py", "import pytorch_lightning", "pytorch_lightning only"),
        ("imagination/settings/data.py", "from omegaconf import OmegaConf", "omegaconf only"),
        ("worldmodel/a.py", "import hydra.utils", "hydra only"),
        ("imagination/deep/utils.py", "", "name"),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, file: str, source: str, tokens: str) -> None:
    (found,) = planted(tmp_path, file, source)
    assert found.startswith(f"{file}:")
    assert set(tokens.split()) <= set(found.split())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("real_envs/a.py", "from real_envs.env import Env\nfrom . import b\nfrom .importers import c\nimport numpy"),
        ("policy/lm/engines/vllm.py", "import vllm, torch\nfrom real_envs.env import Task"),
        ("worldmodel/a.py", "from policy.lm.render import render\nfrom policy import lm\nimport policy.lm.batch"),
        ("imagination/learning/trainer.py", "import lightning\nfrom ..rollout.play import p"),
        ("imagination/settings/compose.py", "from hydra import compose\nfrom omegaconf import OmegaConf"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    assert planted(tmp_path, file, source) == []


def test_an_import_of_a_log_loads_no_torch() -> None:
    """It needs 180 MB, and a large log is imported where there is little room."""
    script = "import sys, imagination.commands.import_logs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


# What is about a whole configuration: its composition, its fingerprint, what opens a run with it, and the commands.
WHOLE = (
    *(f"imagination/{name}" for name in ("settings/", "commands/", "session.py", "api.py", "gym.py", "cli.py")),
    *(f"imagination/runs/{name}.py" for name in ("fingerprint", "lifecycle")),
)


def test_below_the_commands_nothing_takes_the_whole_configuration() -> None:
    """What takes all settings depends on all of them, and cannot be called without a run."""
    found = []
    for path in sorted((ROOT / "imagination").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(WHOLE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            annotation = getattr(node, "annotation", None)
            if isinstance(annotation, ast.Name) and annotation.id == "Config":
                found.append(f"{file}:{node.lineno}")
    assert found == []
