"""Which errors are the user's mistakes, told in one line, and which are ours, told with a traceback."""

from __future__ import annotations

import os
import sys

from imagination.settings.schema import ConfigError

# The errors whose message is written for the user. They are named, not imported: most live in heavy modules.
USER_ERRORS = (
    ("imagination.settings.errors", "UserError"),
    ("imagination.pages.report.report", "ReportError"),
    ("policy.lm.backbone", "CheckpointError"),
    ("policy.lm.engine", "EngineUnavailable"),
    ("policy.lm.engine", "UnsupportedModel"),
    ("policy.lm.render", "ChatTemplateError"),
    ("real_envs.manifest", "StoreError"),
    ("real_envs.registry", "UnknownWorld"),
)


def told_in_a_line(error: Exception) -> bool:
    """Whether the error says what the user can do, and ``IMAGINE_TRACEBACK=1`` does not ask where it was raised.

    A type that was never imported cannot have been raised.
    """
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in USER_ERRORS]
    known = isinstance(error, (ConfigError, *(kind for kind in kinds if kind)))
    return known and os.environ.get("IMAGINE_TRACEBACK") != "1"
