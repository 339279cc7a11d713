"""What a user gets wrong: one clear line that names the file and the reason, exit code 2, and nothing is lost."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.cli import main
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory
from tests.support.tiny import TASKS, logged_episode, write_log


def _files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _fails(stage: str, run: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Runs a stage of the command that must fail; returns the one line it printed."""
    capsys.readouterr()
    code = main([stage, f"run={run.name}", f"output={run.parent}", *overrides])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert code == 2
    assert len(lines) == 1
    return lines[0]


def _truncate(log: Path) -> None:
    shard = next(log.glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _drop_manifest(log: Path) -> None:
    (log / "manifest.json").unlink()


def _future_version(log: Path) -> None:
    manifest = json.loads((log / "manifest.json").read_text())
    (log / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))


def _no_actions(log: Path) -> None:
    shutil.rmtree(log)
    store = TrajectoryStore.create(log, {"train": list(TASKS)})
    failed = Trajectory(
        "x", "corridor-a", "g", Source.REAL, "noisy", 0, "", (), StopReason.ENV_CRASHED, failure="broke at reset"
    )
    store.append([failed])


def _empty_split(log: Path) -> None:
    shutil.rmtree(log)
    store = TrajectoryStore.create(log, {"train": ["corridor-a"], "heldout": ["corridor-b"]})
    store.append([logged_episode("corridor-b", 0)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk with these options, such as ``size=700k``, or changes one that is mounted; its folder."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        again = "remount," if place.is_mount() else ""
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("only root may mount a disk")
        return place

    if shutil.which("mount") is None:
        pytest.skip("no disk can be mounted here")
    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_and_a_read_only_disk_lose_nothing_and_the_run_goes_on_with_room(
    small_disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk("size=8k")
    assert "full" in _fails("fit-world-model", disk / "sweep" / "a", capsys)
    assert list(disk.iterdir()) == [], "no folder of a run that holds nothing"
    run = small_disk("size=900k") / "mine"
    write_log(run)
    log = _files(run / "log")
    assert "full" in _fails("fit-world-model", run, capsys, "preset=tiny", "fit.steps=20")
    assert _files(run / "log") == log
    assert list(run.rglob("*.tmp")) == [], "a draft would take what room there is"
    small_disk("size=20m")
    assert main(["fit-world-model", "run=mine", f"output={disk}"]) == 0
    model = _files(run / "models")
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) // 1024
    small_disk(f"size={size + 200}k")  # too little for a second model
    assert "full" in _fails("fit-world-model", run, capsys, "fit.steps=21")
    assert _files(run / "models") == model
    small_disk("size=20m,ro")
    before = _files(run)
    for stage in ("report", "train", "fit-world-model"):
        assert "read-only" in _fails(stage, run, capsys, "seed=3")
    assert main(["list", f"output={disk}"]) == 0
    assert _files(run) == before


@pytest.mark.parametrize(
    ("damage", "named", "reason"),
    [
        (_truncate, ".parquet", "bytes"),
        (_drop_manifest, "manifest.json", "no such file"),
        (_future_version, "manifest.json", "99"),
        (_no_actions, "manifest.json", "has an action"),
        (_empty_split, "manifest.json", "has no episodes"),
    ],
)
def test_a_broken_log(
    damage: Callable[[Path], None], named: str, reason: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "log")
    before = _files(run / "log")
    line = _fails("fit-world-model", run, capsys)
    assert named in line
    assert reason in line
    assert _files(run / "log") == before


def test_a_stage_whose_input_is_missing_names_the_stage_that_makes_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "imagine clone" in _fails("train", run, capsys)
    for stage in ("evaluate", "fit-world-model", "train", "audit", "panel", "report", "serve", "reflect", "loop"):
        line = _fails(stage, run.parent / "nothing" / "yet", capsys, *(["loop.price=1"] if stage == "loop" else []))
        assert "imagine" in line or stage == "loop"
        assert not (run.parent / "nothing").exists(), "a refused stage leaves no folder"


def test_a_log_of_ones_own_is_neither_evaluated_nor_added_to_in_another_world(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(run / "log")
    for stage in ("evaluate", "collect"):
        assert "would be played" in _fails(stage, run, capsys)
    assert _files(run / "log") == before
    assert not (run / "games").exists()


def test_limits_that_the_log_does_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "dream.max_tokens=4" in _fails("fit-world-model", run, capsys, "dream.max_tokens=4", "vocab_size=300")
    assert "worldmodel.context=16" in _fails(
        "fit-world-model", run, capsys, "dream.max_tokens=96", "worldmodel.context=16"
    )


def test_a_log_without_rewards(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "log")
    store = TrajectoryStore.create(run / "log", {"train": list(TASKS)})
    unpaid = [logged_episode(task, n) for task in TASKS for n in range(5)]
    store.append(replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns)) for t in unpaid)
    assert "reward" in _fails("fit-world-model", run, capsys)


def test_a_checkpoint_of_the_wrong_vocabulary(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from policy.lm.backbone import build_model, save_checkpoint
    from policy.lm.settings import ModelSettings
    from policy.lm.tokenizer import train_tokenizer

    folder = tmp_path / "mixed-up"
    small, large = (
        train_tokenizer(["a"], 300),
        train_tokenizer(["some longer text, some longer text"] * 3, 290, ["\n!"]),
    )
    save_checkpoint(
        build_model(ModelSettings(hidden=16, layers=1, heads=1, kv_heads=1, mlp=16), small, 0), large, folder
    )
    before = _files(folder)
    line = _fails("clone", run, capsys, f"policy.model={folder}")
    assert str(folder) in line
    assert "wrong vocabulary" in line
    assert _files(folder) == before


def test_checkpoints_that_cannot_serve(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No chat template, a tokenizer that cannot write back what it reads, a torn GGUF file: a line each."""
    from tokenizers import normalizers

    from policy.lm.backbone import build_model, save_checkpoint
    from policy.lm.settings import ModelSettings
    from policy.lm.tokenizer import train_tokenizer

    size = ModelSettings(hidden=16, layers=1, heads=1, kv_heads=1, mlp=16)
    for name in ("silent", "lossy"):
        tokenizer = train_tokenizer(["Take the lamp."], 300)
        if name == "silent":
            tokenizer.chat_template = None
        else:
            tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "o")
        save_checkpoint(build_model(size, tokenizer, 0), tokenizer, tmp_path / name)
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(10))
    line = _fails("fit-world-model", run, capsys, f"worldmodel.model={tmp_path / 'silent'}")
    assert "silent' " in line
    assert "chat template" in line
    line = _fails("fit-world-model", run, capsys, f"worldmodel.model={tmp_path / 'lossy'}")
    assert "lossy' cannot write" in line
    assert "comes back as" in line
    line = _fails("fit-world-model", run, capsys, f"worldmodel.model={tmp_path / 'torn.gguf'}")
    assert f"{tmp_path / 'torn.gguf'}: torn" in line
    assert not (run / "models").exists()


def test_a_template_in_a_file_takes_the_place_of_that_of_a_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from policy.lm.backbone import build_model, load_tokenizer, save_checkpoint
    from policy.lm.settings import ModelSettings
    from policy.lm.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["You walk east. Here is a lamp. Nothing new. [reward=0]"], 400)
    template, file, thinking = str(tokenizer.chat_template), tmp_path / "plain ${x}=1.jinja", tmp_path / "thinking"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<think>{% endif %}"
    size = ModelSettings(hidden=16, layers=1, heads=1, kv_heads=1, mlp=16)
    save_checkpoint(build_model(size, tokenizer, 0), tokenizer, thinking)
    words = [f"worldmodel.model={thinking}", "fit.steps=2", "worldmodel.rules=off"]
    assert "worldmodel.chat_template=" in _fails("fit-world-model", run, capsys, *words)
    assert "none.jinja" in _fails("fit-world-model", run, capsys, *words, "worldmodel.chat_template=none.jinja")
    file.write_text("{{ messages[0].content[0].text.strip() }}")
    chosen = f"worldmodel.chat_template={file}"
    assert "cannot write plain messages" in _fails("fit-world-model", run, capsys, *words, chosen)
    file.write_text(template)
    assert "model=" in _fails("fit-world-model", run, capsys, chosen, "worldmodel.model=")
    assert main(["fit-world-model", f"run={run.name}", f"output={run.parent}", *words, chosen]) == 0
    assert load_tokenizer(run / "models" / "worldmodel").chat_template == template


def test_settings_that_contradict_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.group_size" in _fails("train", run, capsys, "train.group_size=1")
    assert "train.expert_share" in _fails("train", run, capsys, "train.group_size=4", "train.expert_share=1.0")
    assert "algorithm.tis_cap" in _fails("train", run, capsys, "train.group_size=4", "algorithm.tis_cap=0.5")


def test_no_demonstrations_to_clone_names_the_agents_that_are_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _fails("clone", run, capsys, "clone.agents=[nobody]")
    assert "nobody" in line
    assert "noisy" in line
