"""What a user has done wrong, and can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong and what to do; no traceback is shown."""
