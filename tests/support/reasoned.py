"""An episode whose logged turns carry a thought, in bytes."""

from __future__ import annotations

from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.formats.full import DELIMITER

BYTES = ChatFormat(train_tokenizer([], 261))  # one token a byte, so that lengths can be counted by hand
LINE = len(DELIMITER)
HALL = "-= Hall =-\nA lamp is here."
TURNS = (
    Turn("take lamp", "Taken.", 0.0, False, {"reasoning": "Zounds, it can be taken."}),
    Turn("look", "-= Hall =-", 0.0, False),
    Turn("go east", "The End", 1.0, True, {"reasoning": ""}),
)
EPISODE = Trajectory("e", "t", "g", Source.REAL, "a", 0, HALL, TURNS, StopReason.TERMINATED)
