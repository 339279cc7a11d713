"""Dreams as a Gymnasium environment. If these fail, whatever is made for Gymnasium does not run in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="pip install 'imagination[gymnasium]'")
import gymnasium
from gymnasium.utils.env_checker import check_env

from imagination.gym import ID, DreamGym
from imagination.serving.sessions import Refused
from imagination.settings.dreams import ServeSettings
from real_envs.worlds.gymnasium_text import Plain, Stepped
from tests.support.served import STARTS, Planted, planted_world


@pytest.fixture
def env() -> Iterator[DreamGym]:
    made = DreamGym(planted_world(), ServeSettings(action_chars=100))
    yield made
    made.close()


def test_it_passes_gymnasiums_own_check(env: DreamGym) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    assert [str(w.message) for w in told if "spec" not in str(w.message)] == []  # spec: it was not made by its id here


def test_an_episode(env: DreamGym) -> None:
    text, info = env.reset(seed=1)
    assert (text, info["task"], info["seed"]) == (STARTS["hall@0"].text, "hall", 1)
    text, reward, terminated, truncated, info = env.step("look")
    assert (reward, terminated, truncated, info["trusted"], info["confidence"]) == (0.0, False, False, True, 0.75)
    assert env.step("win")[:4] == ("You win.", 1.0, True, False)
    with pytest.raises(Refused, match="reset first"):
        env.step("look")
    assert env.reset(seed=0, options={"task": "hall"})[0] == STARTS["hall@0"].text
    assert env.step("doubt")[1:4] == (0.0, False, True)


def test_seeds_go_on_from_the_first_one(env: DreamGym) -> None:
    """As Gymnasium has it: one seed for all episodes of an experiment."""

    def seeds() -> list[Any]:
        return [env.reset(seed=3)[1]["seed"], *(env.reset()[1]["seed"] for _ in range(3))]

    first = seeds()
    assert first == seeds()
    assert len(set(first)) == 4


def test_observations_are_in_their_space_whatever_is_written(env: DreamGym) -> None:
    env.reset(seed=0)
    text, *_ = env.step("ein Lämpchen \U0001f4a1")
    assert "\U0001f4a1" in text
    assert env.observation_space.contains(text)
    assert not env.action_space.contains("a" * 101)
    assert all(env.action_space.contains(env.action_space.sample()) for _ in range(20))


def test_our_own_world_of_gymnasium_environments_plays_it(env: DreamGym) -> None:
    plain = Plain(env)
    assert plain.reset(1) == STARTS["hall@0"].text
    assert plain.step("win") == Stepped("You win.", 1.0, True, False)


def test_closing_frees_the_dream_and_may_be_repeated() -> None:
    model = Planted()
    env = DreamGym(planted_world(model), ServeSettings())
    env.reset(seed=0)
    env.close()
    env.close()
    assert len(model.released) == 1


def test_the_id_is_registered() -> None:
    assert ID == "imagination/Dream-v0"
    assert gymnasium.spec(ID).entry_point == "imagination.gym:make_dream"
