"""Which episodes of the log a policy imitates."""

from dataclasses import replace

import pytest

from imagination.commands.clone import imitated
from imagination.settings import CloneSettings, UserError
from real_envs.trajectory import Source, Turn
from tests.support.comparisons import episode


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
