"""A world small enough to be solved exactly, with all that makes multi-turn credit hard.

Three rooms in a row. The key is in room 0 and the door in room 2; opening the door with the key pays 1, at the end.
Giving up pays 0.1 at once, anywhere. An action is two tokens, a verb and an object; an observation of two tokens comes
between actions; each action slips with a chance of a tenth and then nothing happens. There are four starts, from room 0
with the key to room 2 without it, where six right actions in a row are needed of the ten that an episode has.

    go 0, 1, 2: to that room, if it is next to this one      take 0: the key, in room 0
    open 2: the door, in room 2 with the key                 open 0: give up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TURNS, SLIP, VERBS, OBJECTS = 10, 0.1, 3, 3
ROOMS, GIVE_UP = 3, 0.1
STATES = 2 * ROOMS  # room + ROOMS if it has the key
STARTS = (0 + ROOMS, 0, 1, 2)
OBSERVATION = 2  # tokens
TURN = OBSERVATION + 2
TIME = TURNS * TURN + OBSERVATION


def effect(state: int, verb: int, thing: int) -> tuple[int, float, bool]:
    """``(next state, reward, end)`` of an action that did not slip."""
    room, key = state % ROOMS, state // ROOMS
    if verb == 0 and abs(thing - room) <= 1:
        return thing + ROOMS * key, 0.0, False
    if verb == 1 and thing == 0 and room == 0:
        return ROOMS, 0.0, False
    if verb == 2 and thing == 0:
        return state, GIVE_UP, True
    if verb == 2 and thing == 2 and room == 2 and key:
        return state, 1.0, True
    return state, 0.0, False


ACTIONS = [(verb, thing) for verb in range(VERBS) for thing in range(OBJECTS)]


def value(choose: Callable[[int, Sequence[float]], float]) -> float:
    """Mean over the starts of what a policy earns, by dynamic programming backwards from the last turn.

    Args:
        choose: what a state is worth, from the state and the worths of the actions in it.
    """
    worth = [0.0] * STATES
    for _ in range(TURNS):
        later, worth = worth, []
        for state in range(STATES):
            by_action = []
            for action in ACTIONS:
                after, reward, end = effect(state, *action)
                by_action.append((1 - SLIP) * (reward + (0.0 if end else later[after])) + SLIP * later[state])
            worth.append(choose(state, by_action))
    return sum(worth[s] for s in STARTS) / len(STARTS)


OPTIMUM = value(lambda _, worths: max(worths))


def value_of(policy: Sequence[Sequence[float]]) -> float:
    """Of a policy given as ``[states][actions]`` probabilities; exact, no episode is played."""
    return value(lambda state, worths: sum(p * w for p, w in zip(policy[state], worths, strict=True)))


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes as tokens: ``OBSERVATION`` tokens, an action of two, again and again, and a trailing observation.

    Attributes:
        state, first, token: ``[batch, time]``, what the policy had before it at each action token (the state, and the
            verb where it has been said, else -1), and what it said; -1 on other tokens.
        turn: ``[batch, time]``, the turn of each action token, -1 on other tokens.
        rewards, anchors: ``[batch, turns]``.
        groups, valid: ``[batch]``.
        logprobs: ``[batch, time]``, as the tokens were sampled; NaN on other tokens.
    """

    state: Tensor
    first: Tensor
    token: Tensor
    turn: Tensor
    rewards: Tensor
    anchors: Tensor
    groups: Tensor
    valid: Tensor
    logprobs: Tensor


@torch.no_grad()
def play(verbs: Tensor, things: Tensor, group_size: int, rng: torch.Generator, failures: float = 0.03) -> Played:
    """One group per start. ``verbs [states, VERBS]`` and ``things [states, VERBS, OBJECTS]`` are probabilities.

    A share of the episodes fails, as rollouts do: not valid, rewards NaN.
    """
    batch = len(STARTS) * group_size
    state = torch.tensor(STARTS).repeat_interleave(group_size)
    groups, alive = state.clone(), torch.ones(batch, dtype=torch.bool)
    table = torch.tensor([[effect(s, *a)[0] for a in ACTIONS] for s in range(STATES)])
    pays = torch.tensor([[effect(s, *a)[1] for a in ACTIONS] for s in range(STATES)])
    empty = torch.full((batch, TIME), -1)
    seen, first, token, turn = empty.clone(), empty.clone(), empty.clone(), empty.clone()
    rewards, anchors = torch.zeros(batch, TURNS), torch.full((batch, TURNS), -1)
    logprobs = torch.full((batch, TIME), torch.nan)
    for k in range(TURNS):
        at = k * TURN + OBSERVATION
        verb = torch.multinomial(verbs[state], 1, generator=rng)[:, 0]
        thing = torch.multinomial(things[state, verb], 1, generator=rng)[:, 0]
        seen[:, at : at + 2] = torch.where(alive, state, -1)[:, None]
        first[:, at + 1] = torch.where(alive, verb, -1)
        token[:, at] = torch.where(alive, verb, -1)
        token[:, at + 1] = torch.where(alive, thing, -1)
        turn[:, at : at + 2] = torch.where(alive, k, -1)[:, None]
        logprobs[:, at] = verbs[state, verb].log().masked_fill(~alive, torch.nan)
        logprobs[:, at + 1] = things[state, verb, thing].log().masked_fill(~alive, torch.nan)
        anchors[:, k] = torch.where(alive, state, -1)
        action = verb * OBJECTS + thing
        holds = alive & (torch.rand(batch, generator=rng) >= SLIP)
        rewards[:, k] = torch.where(holds, pays[state, action], 0.0)
        alive = alive & (rewards[:, k] == 0)
        state = torch.where(holds, table[state, action], state)
    valid = torch.rand(batch, generator=rng) >= failures
    rewards[~valid] = torch.nan
    return Played(seen, first, token, turn, rewards, anchors, groups, valid, logprobs)
