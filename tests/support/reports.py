"""Run folders to report on, without a run, and a reader of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from worldmodel.evaluation.proportions import Proportion

Json = dict[str, Any]


def summary() -> Json:
    def p(successes: int, n: int) -> Json:
        return Proportion(successes, n).to_json()

    audit = dict.fromkeys(("exact_match", "token_f1", "reward_precision", "reward_recall", "end_accuracy"), 0.9)
    return {
        **{"dreamed_turns": 184320, "seed": 0, "hardware": "2 CPU cores", "versions": {"torch": "2.9"}},
        "real_steps": {"collect": 12400, "fit_world_model": 0, "clone": 0, "train": 0, "evaluate": 600},
        "wall_seconds": {"collect": 40.0, "fit_world_model": 300.5, "train": 610.0},
        "world_model": {**audit, "n": 500, "on_policy": {**audit, "n": 100}},
        "policy": {
            "before": {"train_tasks": p(20, 64), "heldout_tasks": p(18, 64), "dream_success": p(87, 256)},
            "after": {"train_tasks": p(41, 64), "heldout_tasks": p(26, 64), "dream_success": p(179, 256)},
        },
    }


# Of a whole run, for every picture of a page; to draw them takes a second, so tests of words do without.
TRAINED = [{"stage": "fit_world_model", "step": s, "time": s, "loss": 3 / (s + 1)} for s in range(60)] + [
    {"stage": "train", "step": s, "time": s, "dream_success": s / 60, "tokens_dream": 0.8, "tokens_real": 0.2,
     "kl": 0.01, "entropy": float("nan") if s == 3 else 1.0, "clip_fraction": 0.1}
    for s in range(60)
]  # fmt: skip


def write_run(folder: Path, summary: Json, rollouts: list[Json], metrics: Sequence[Json] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 0\nname: <b>\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    return folder


def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


class Page(HTMLParser):
    """Collects tags, addresses and visible text; checks that what is opened is closed."""

    VOID = ("meta", "br", "img", "link", "circle", "line", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
