"""What a user has done wrong, and can mend."""

from __future__ import annotations

import os


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong and what to do; no traceback is shown.

    Every error that is written for the user derives from it.
    """


def hides_traceback(error: Exception) -> bool:
    """Whether the message is enough; ``IMAGINE_TRACEBACK=1`` asks where it was raised, too."""
    return isinstance(error, UserError) and os.environ.get("IMAGINE_TRACEBACK") != "1"
