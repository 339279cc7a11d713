"""The line of a bar, its speed and the time left; what a log file gets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from imagination.runs.progress_bar import LINE, Bar


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def started(clock: Clock, *about: Any, done: int = 0) -> Bar:
    bar = Bar(*about, clock=clock)
    bar.start(done=done)
    bar.stop()  # it draws no more by itself
    return bar


def test_the_line_says_how_far_how_fast_and_how_long_yet(clock: Clock) -> None:
    bar = started(clock, "train", 24, "turns")
    clock.now += 60
    bar.count(1200)
    bar.advance(6, {"dream_success": 0.4213})
    # 6 of 24 in a minute: the other 18 take three; 1200 turns in 60 s are 20 a second
    assert " ".join(bar.line().split()) == "train 6/24 25% 1:00, 3:00 left, 20 turns/s, dream_success 0.421"
    assert LINE.match(bar.line())


def test_what_an_earlier_process_did_is_not_counted_as_speed(clock: Clock) -> None:
    bar = started(clock, "train", 20, done=10)
    clock.now += 10
    bar.advance(15)
    assert "15/20  75% 0:10, 0:10 left" in bar.line()


def test_the_first_step_moves_before_it_is_done(clock: Clock) -> None:
    bar = started(clock, "train", 20, "turns")
    clock.now += 3700
    bar.count(7400)
    assert bar.line().endswith("0/20   0% 1:01:40, 2.0 turns/s")


def test_a_long_step_moves_the_bar_and_the_time_left_before_it_is_done(clock: Clock) -> None:
    bar = started(clock, "fit", 10, "tokens")
    bar.advance(1)
    bar.within(0.5)
    clock.now += 30
    # 1.5 of 10 steps in half a minute: the other 8.5 take 170 s
    assert "1/10  15% 0:30, 2:50 left" in bar.line()
    bar.advance(2)
    assert "2/10  20% 0:30, 2:00 left" in bar.line()


def test_a_file_gets_a_line_now_and_then_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("fit", 1000, every=0.2) as bar:
        for done in range(1, 1001):
            bar.advance(done)
            time.sleep(0.0005)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10, "not a line a step"
    assert "1000/1000 100%" in lines[-1]
    assert all(LINE.match(line) for line in lines)


def test_a_short_stage_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("fit", 2) as bar:
        bar.advance(2)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_stopped_stage_does_not_look_finished(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("fit", 4) as bar:
        bar.advance(1)
    assert "1/4  25%" in capsys.readouterr().err


def test_an_empty_stage_is_done() -> None:
    assert "0/0 100%" in Bar("play", 0).line()
