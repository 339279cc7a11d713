"""A world model as an environment server."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass
class ServeSettings:
    """Who may play in the dreams of a run, and how much at a time.

    Attributes:
        host: address to listen on; any but this machine's own wants a token.
        port: 0 takes a free one.
        token: the environment variable that holds the token which clients must show; unset or empty is none.
        branch: episodes also begin in the middle of logged ones; the seed chooses where.
        max_turns: of an episode, which is then truncated; 0 takes dream.max_turns.
        sessions: open at a time.
        idle_seconds: after which a session that nothing is asked of is closed.
        action_chars: of an action, at most.
        message_bytes: of a request or message, at most.
        requests: HTTP requests under way at a time.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = "IMAGINE_SERVE_TOKEN"
    branch: bool = False
    max_turns: int = 0
    sessions: int = 64
    idle_seconds: float = 600.0
    action_chars: int = 2000
    message_bytes: int = 131072
    requests: int = 256

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port < 2**16:
            raise ValueError(f"host must not be empty and port is 0 to 65535, got {self.host!r} and {self.port}")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.token):  # not repeated here: it may be the token itself
            raise ValueError("token is the name of an environment variable, in capitals; the token itself stands there")
        if min(self.sessions, self.action_chars, self.message_bytes, self.requests) < 1 or self.max_turns < 0:
            raise ValueError("sessions, action_chars, message_bytes and requests must be at least 1, max_turns 0")
        if not self.idle_seconds > 0:
            raise ValueError(f"idle_seconds must be more than 0, got {self.idle_seconds}")
