"""The page of dreamed screens. If these fail, it shows other pictures than it names, or runs what a page has said."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from imagination.report.screens_page import audit_table, render_screens
from real_envs.screens import keep

HOSTILE = "</script><img src=x onerror=alert(1)>"


def comparison(folder: Path) -> dict[str, Any]:
    start, real, dream = (keep(np.full((4, 6, 3), shade, dtype=np.uint8), folder) for shade in (0, 100, 200))
    turn = {"action": HOSTILE, "place": [0.1, 0.2, 0.3, 0.4], "reward": 1.0, "terminated": True,
            "real": real, "shrunk": start, "dream": dream, "ahead": "0" * 32 + ".png",
            "changes": True, "off": 0.5, "parted": True, "psnr": 9.0, "iou": None}  # fmt: skip
    episode = {"id": HOSTILE, "task_id": "t", "goal": HOSTILE, "start": start, "parted": 0, "turns": [turn]}
    whole = {"run": HOSTILE, "seed": 0, "steps": 4, "size": [4, 6], "model_version": "v"}
    return {**whole, "episodes": [episode, {**episode, "parted": None}]}


def test_pictures_are_inside_and_text_is_no_code(tmp_path: Path) -> None:
    page = render_screens(comparison(tmp_path), [tmp_path / "elsewhere", tmp_path])
    assert "1 of 2 episodes" in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert len(data["pictures"]) == 3, "each once"
    assert all(address.startswith("data:image/png;base64,") for address in data["pictures"])
    turn = data["episodes"][0]["turns"][0]
    assert [data["episodes"][0]["start"], turn["real"], turn["dream"], turn["ahead"]] == [1, 2, 3, 0]
    assert turn["action"] == HOSTILE
    assert "<img src=x" not in page
    assert "default-src 'none'" in page
    assert "innerHTML" not in page


def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    assert "no episode" in render_screens({**comparison(tmp_path), "episodes": []}, [])


def test_the_table_tells_dashes_from_zeros() -> None:
    none, some = {"value": None, "n": 0, "ci95": None}, {"value": 0.0, "n": 3, "ci95": [0.0, 0.5]}
    alike = {key: {"dream": some, "copy": none} for key in ("psnr", "ssim", "changed_region_psnr")}
    alike |= {key: {"dream": none} for key in ("changed_region_iou", "unchanged_left_alone")}
    found = {"run": "r", "steps": 4, "one_turn": alike, "open_loop": alike, "probe": None, "notes": ["a note"],
             "sensitivity": {"differ": some, "own": some, "same": none},
             "speed": {"screens_per_second": 20.5, "screens_per_core_second": 11.0, "threads": 2}}  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(audit_table(found))
    said = console.export_text()
    assert re.search(r"PSNR, dB\s+│\s+0\.0 \[0\.0, 0\.5\]\s+│\s+–\s+│\s+3", said)
    assert "20.5 screens a second" in said
    assert "note: a note" in said
