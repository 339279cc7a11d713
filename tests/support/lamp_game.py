"""A small text game for servers of tests: a lamp lies some rooms away, behind doors of other colours in each task."""

from __future__ import annotations

import random

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
COMMANDS = "|".join(("look", "take lamp", *(f"open {colour}" for colour in COLOURS)))


def doors(number: int) -> list[str]:
    """The colours of the two doors, in the order in which they are met."""
    return random.Random(number).sample(COLOURS, 2)


def solution(number: int) -> list[str]:
    return [*(f"open {colour}" for colour in doors(number)), "take lamp"]


class Lamp:
    """Open the doors, then take the lamp: half a point for the last door, half a point for the lamp."""

    def __init__(self) -> None:
        self.doors: list[str] = []
        self.at = 0
        self.done = False

    def start(self, number: int) -> str:
        self.doors, self.at, self.done = doors(number), 0, False
        return f"Find the lamp behind the {self.doors[1]} door. {self.look()}"

    def look(self) -> str:
        here = f"a {self.doors[self.at]} door" if self.at < len(self.doors) else "a lamp"
        return f"You see {here}."

    def act(self, action: str) -> tuple[str, float]:
        """What is seen, and what it earned."""
        if action == "look":
            return self.look(), 0.0
        if action == "take lamp" and self.at == len(self.doors):
            self.done = True
            return "You take the lamp.", 0.5
        if self.at < len(self.doors) and action == f"open {self.doors[self.at]}":
            self.at += 1
            return f"You open the door. {self.look()}", 0.5 * (self.at == len(self.doors))
        return "Unknown action.", 0.0
