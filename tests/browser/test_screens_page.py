"""The page of dreamed screens in a real browser: the slider, the list, and pictures that stand where they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from imagination.report.screens_page import render_screens
from real_envs.screens import keep
from tests.support.chromium import Chromium

HOSTILE = "</script><img src=x onerror=alert(1)>"


def write_page(folder: Path) -> Path:
    """Two episodes of three turns; the second parts at its second turn. Returns its path."""
    shades = [keep(np.full((8, 12, 3), 20 * k, dtype=np.uint8), folder) for k in range(8)]

    def turn(k: int, parted: bool) -> dict[str, object]:
        return {
            "action": f"click('{k}') {HOSTILE}", "place": [0.25, 0.5, 0.5, 0.25] if k else None, "reward": None,
            "terminated": k == 2, "real": shades[k + 1], "shrunk": shades[k + 1],
            "dream": shades[k + 4 if parted else k + 1], "ahead": shades[k + 1], "changes": True,
            "off": 0.3 if parted else 0.0, "parted": parted, "psnr": 20.0, "iou": 0.5,
        }  # fmt: skip

    episodes = [
        {"id": name, "task_id": "t", "goal": f"Goal: {name}", "start": shades[0], "parted": 1 if parts else None,
         "turns": [turn(k, parts and k > 0) for k in range(3)]}
        for name, parts in (("true", False), ("apart", True))
    ]  # fmt: skip
    whole = {"run": "r", "seed": 0, "steps": 4, "size": [8, 12], "model_version": "v", "episodes": episodes}
    (folder / "page.html").write_text(render_screens(whole, [folder]))
    return folder / "page.html"


def test_the_slider_shows_each_turn_and_the_list_each_episode(fresh: Chromium, tmp_path: Path) -> None:
    fresh.open(write_page(tmp_path))
    assert fresh.run("document.querySelectorAll('#episodes button').length") == 2
    assert fresh.run("document.getElementById('number').textContent") == "Turn 1 of 3:"
    assert fresh.run("document.getElementById('previous').disabled") is True
    assert fresh.run("[...document.images].every((i) => i.complete && i.naturalWidth === 12)") is True
    first = fresh.run("document.querySelector('#real img').src")
    assert fresh.run("document.querySelectorAll('#before .place').length") == 0
    fresh.run("{const s = document.getElementById('turn'); s.value = 1; s.dispatchEvent(new Event('input'))}")
    assert fresh.run("document.getElementById('number').textContent") == "Turn 2 of 3:"
    assert fresh.run("document.querySelector('#before img').src") == first, "the real screen before this turn"
    left, width = fresh.run(
        "(() => { const p = document.querySelector('.place').getBoundingClientRect(),"
        " b = document.getElementById('before').getBoundingClientRect();"
        " return [(p.left - b.left) / b.width, p.width / b.width] })()"
    )
    assert abs(left - 0.25) < 0.02
    assert abs(width - 0.5) < 0.02
    assert HOSTILE in fresh.run("document.getElementById('action').textContent")
    fresh.run("{const w = document.getElementById('which'); w.value = 'parted'; w.dispatchEvent(new Event('change'))}")
    assert fresh.run("document.getElementById('name').textContent") == "apart"
    fresh.run("document.getElementById('parting').click()")
    assert fresh.run("document.getElementById('number').textContent") == "Turn 2 of 3:"
    assert fresh.run("document.querySelectorAll('#episodes button').length") == 1
    assert [url for url in fresh.requests if not url.startswith(("file:", "data:"))] == []
