"""Whatever is sent to the server, it answers within its protocols, and nobody else's session notices.

If these fail, one client with a typing error, or bad intent, ends the dreams of all.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from tests.support.abuse import SENDERS, undisturbed

EXAMPLES = 150
MANY = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None)


@pytest.mark.parametrize("what", SENDERS)
def test_nonsense_is_answered_and_disturbs_nobody(what: str) -> None:
    with undisturbed() as (address, witness):
        SENDERS[what](address, witness, MANY)
        assert len(witness.read) >= EXAMPLES
