"""Which episodes of the log a policy imitates."""

from dataclasses import replace

import pytest

from imagination.commands.clone import imitated, with_short_actions
from imagination.settings import CloneSettings, UserError
from real_envs.trajectory import Source, Turn
from tests.support.comparisons import episode
from tests.support.reasoned import BYTES


def logged(name, agent, reward):
    return replace(episode(name, [Turn("go", "north", reward, True)], Source.REAL), agent=agent)


LOG = [
    logged("won", "noisy-0.2", 1.0),
    logged("half", "noisy-0.2", 0.5),
    replace(logged("judged", "noisy-0.2", 0.0), success=True),
    logged("expert", "expert", 1.0),
    logged("lost", "random", 0.0),
]


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, ["won", "half", "judged"]),
        ({"solved_only": True}, ["won", "judged"]),
        ({"agents": [""], "solved_only": True}, ["won", "judged", "expert"]),
    ],
)
def test_agents_and_success_choose_what_is_imitated(settings, ids):
    assert [t.id for t in imitated(LOG, CloneSettings(**settings))] == ids


@pytest.mark.parametrize("agents", ["random", "gpt"])
def test_a_log_without_such_an_episode_is_refused_unless_there_is_more(agents):
    settings = CloneSettings(agents=[agents], solved_only=True)
    with pytest.raises(UserError, match="clone.solved_only" if agents == "random" else "clone.agents"):
        imitated(LOG, settings)
    assert imitated(LOG, settings, needed=False) == []


def test_a_renamed_copy_with_an_action_that_no_policy_can_write_is_left_out_and_counted(capsys):
    copies = [
        episode(name, [Turn("take", "ok", 0.0, False), Turn(name, "ok", 0.0, False)], Source.REAL)
        for name in ("oak", "nylon")
    ]
    assert with_short_actions(copies, BYTES, 5) == copies[:1]  # five letters, and the token that ends them
    assert "1 of 2 renamed copies have actions longer than max_action_tokens=5" in capsys.readouterr().err
    assert with_short_actions(copies, BYTES, 6) == copies
    assert not capsys.readouterr().err
