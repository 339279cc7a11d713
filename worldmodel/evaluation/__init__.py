"""How good is it to dream in? Pure functions from predictions beside reality to numbers with n and interval.

What one turn ahead of a real history is worth (``transitions``, ``confidence``, ``calibration``, ``refusals``,
``sensitivity``), what several turns are (``drift``), and what the dreams of whole policies are (``success``,
``agreement``, ``behaviour``).
"""

from worldmodel.evaluation.confidence import expected_calibration_error
from worldmodel.evaluation.transitions import Judged, audit_metrics, in_new_situations, judge, token_f1

__all__ = ["Judged", "audit_metrics", "expected_calibration_error", "in_new_situations", "judge", "token_f1"]
