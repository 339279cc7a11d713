"""A log of screenshots becomes a model of screens, which is measured and shown. A square moves where one clicks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import torch
from safetensors.torch import load_file

from imagination.cli import main
from imagination.learning.screen_module import ScreenModule
from imagination.rollout.world_models import form_of
from imagination.settings import UserError, WorldModelSettings
from real_envs.screens import keep
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.square_pages import write_log

SCREEN = {"shrink": 1, "patch": 4, "channels": "[16,16]", "batch": 8, "crop": 24, "finest": 4}
FIT = {"lr": 0.003, "warmup": 5, "average": 0.9, "steps": 80}


def words(output: Path, **fit: float) -> list[str]:
    return [
        f"output={output}", "run=squares", "logger=none", "worldmodel.kind=screen", "worldmodel.unchanged_share=0.25",
        *(f"worldmodel.screen.{key}={value}" for key, value in SCREEN.items()),
        *(f"fit.{key}={value}" for key, value in {**FIT, **fit}.items()),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("screens")
    write_log(output / "squares", train=20, heldout=5)
    assert main(["fit-world-model", *words(output)]) == 0
    return output


def test_it_learns_where_the_square_goes_on_pages_of_other_episodes(fitted: Path) -> None:
    assert main(["audit", "run=squares", f"output={fitted}"]) == 0
    found = json.loads((fitted / "squares" / "audit-screens.json").read_text())
    ahead = found["one_turn"]
    assert ahead["changed_region_psnr"]["dream"]["value"] > ahead["changed_region_psnr"]["copy"]["value"] + 6
    assert ahead["changed_region_iou"]["dream"]["value"] > 0.5
    assert found["sensitivity"]["own"]["value"] > 0.8
    assert found["sensitivity"]["own"]["n"] > 10
    assert found["probe"]["flips"]["copy"]["value"] < 0.5
    assert found["open_loop"]["turns"] == ahead["turns"] == 40
    summary = json.loads((fitted / "squares" / "summary.json").read_text())
    assert summary["screens"]["turns"] == 160
    assert 0.5 < summary["screens"]["placed_share"] < 1
    assert summary["done"].keys() == {"fit_world_model"}


def test_dreams_stand_beside_reality_on_a_page(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "run=squares", f"output={fitted}"]) == 0
    assert "10 episodes dreamed" in capsys.readouterr().out
    run = fitted / "squares"
    found = json.loads((run / "compare-screens.json").read_text())
    assert len(found["episodes"]) == 10
    assert all(episode["id"].startswith("heldout-") for episode in found["episodes"])
    for episode in found["episodes"]:
        for turn in episode["turns"]:
            assert (run / "dreamed-screens" / turn["dream"]).is_file()
            assert (run / "log" / "screens" / turn["real"]).is_file()
    assert "data:image/png;base64," in (run / "compare-screens.html").read_text()


def test_a_page_and_its_screen_are_dreamed_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Screens are drawn from what the run's world model of text says comes next, and it must have one."""
    run = tmp_path / "squares"
    write_log(run, train=4, heldout=1, coloured=True)
    given = [*words(tmp_path, steps=5), "worldmodel.screen.page_words=8"]
    assert main(["fit-world-model", *given]) == 0
    assert main(["audit", *given]) == 2
    assert "imagine fit-world-model worldmodel.kind=text" in capsys.readouterr().err
    small = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "mlp": 64, "context": 1024}
    text = [f"worldmodel.{key}={value}" for key, value in small.items()]
    text.append("dream.max_tokens=160")
    plain = [f"output={tmp_path}", "run=squares", "logger=none", "fit.copying_steps=0", *text]
    assert main(["fit-world-model", *plain, "worldmodel.kind=text", "fit.steps=2"]) == 0
    capsys.readouterr()
    for stage in ("audit", "compare"):
        assert main([stage, *given, *text]) == 0
    found = json.loads((run / "audit-screens.json").read_text())
    assert found["pages_right"] == 0.0, "two steps of training say nothing that can be read, and screens go on"
    assert found["one_turn"]["turns"] == found["open_loop"]["turns"] == 8


def test_a_stopped_fit_goes_on_and_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {}
    for name in ("whole", "parts"):
        write_log(tmp_path / name / "squares", train=2, heldout=1)
        given = ["fit-world-model", *words(tmp_path / name, steps=6)]
        if name == "parts":
            step: Callable[..., None] = ScreenModule.training_step

            def stops(self: ScreenModule, batch: object, index: int, step: Callable[..., None] = step) -> None:
                if self.global_step == 4:
                    raise KeyboardInterrupt
                step(self, batch, index)

            monkeypatch.setattr(ScreenModule, "training_step", stops)
            assert main(given) == 130
            assert not (tmp_path / name / "squares" / "models").exists()
            monkeypatch.setattr(ScreenModule, "training_step", step)
        assert main(given) == 0
        unet = tmp_path / name / "squares" / "models" / "screen" / "unet"
        weights[name] = load_file(unet / "diffusion_pytorch_model.safetensors")
        steps = (tmp_path / name / "squares" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in steps] == [0]
    for key, value in weights["whole"].items():
        assert torch.equal(value, weights["parts"][key]), key


def test_what_it_cannot_do_is_told_in_a_line(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(stage: str, *more: str, output: Path = tmp_path) -> str:
        capsys.readouterr()
        assert main([stage, *words(output), *more]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: ")
        return said

    blank = TrajectoryStore.create(tmp_path / "squares" / "log", {"train": ["t"]})
    turn = Turn("look", "a page", 0.0, False)
    with blank.writer() as writer:
        writer.add(Trajectory("e", "t", "t", Source.REAL, "x", 0, "start", (turn,), StopReason.TURN_LIMIT))
    assert "screenshot before" in refused("fit-world-model")
    assert "run `imagine fit-world-model worldmodel.kind=screen`" in refused("audit")
    with pytest.raises(UserError, match="draws screens"):
        form_of(WorldModelSettings(kind="screen"), [])
    assert "draws 32x32" in refused("audit", "worldmodel.screen.shrink=2", output=fitted)
    assert "fitted to 4 steps at most" in refused(
        "audit", "worldmodel.screen.finest=16", "worldmodel.screen.steps=8", output=fitted
    )

    shutil.copytree(fitted / "squares" / "log", tmp_path / "b" / "squares" / "log")
    screens = tmp_path / "b" / "squares" / "log" / "screens"
    some = sorted(screens.iterdir())[0]
    larger = keep(np.zeros((40, 40, 3), dtype=np.uint8), tmp_path)
    some.unlink()
    shutil.copy(tmp_path / larger, some)
    assert "several sizes" in refused("fit-world-model", output=tmp_path / "b")
