"""What spares work must not spare a secret. If these fail, a token stays in a log because nobody looked for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from real_envs.importers.masking import Masking
from real_envs.importers.secret_forms import DETECTORS, FORMS, Needs
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

LETTERS = "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2Yz3"
LOWER = LETTERS.lower()
# One for each detector, put together here so that no scanner of this repository finds them.
PLANTED = {
    "ArtifactoryDetector": " AK" + "C" + LETTERS[:20] + " ",
    "AWSKeyDetector": "AB" + "IA" + "ABCDEFGHIJKLMNOP",
    "AzureStorageKeyDetector": "Account" + "Key=" + (LETTERS * 3)[:88],
    "DiscordBotTokenDetector": "M" + LETTERS[:23] + "." + LETTERS[:6] + "." + LETTERS[:27],
    "GitHubTokenDetector": "gh" + "s_" + LETTERS[:18] + "_" + LETTERS[:17],
    "GitLabTokenDetector": "gl" + "dt-" + LETTERS[:24],
    "JwtTokenDetector": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    "MailchimpDetector": LOWER[:32] + "-us" + "12",
    "NpmDetector": "//registry.example.org/:_auth" + "Token=npm_" + LETTERS[:20],
    "OpenAIDetector": "sk" + "-" + LETTERS[:20] + "T3Blbk" + "FJ" + LETTERS[:20],
    "PypiTokenDetector": "pypi-AgEIcHlwaS5v" + "cmc" + (LETTERS * 2)[:72],
    "SendGridDetector": "SG" + "." + LETTERS[:22] + "." + (LETTERS * 2)[:43],
    "SlackDetector": "https://hooks.sl" + "ack.com/services/T" + LETTERS[:8] + "/B" + LETTERS[:8] + "/" + LETTERS[:24],
    "SquareOAuthDetector": "sq0" + "csp-" + (LETTERS * 2)[:43],
    "StripeDetector": "rk" + "_live_" + LETTERS[:24],
    "TelegramBotTokenDetector": "123456789" + ":" + LETTERS[:35],
    "TwilioKeyDetector": "SK" + LOWER[:32],
}


def meets(needs: Sequence[Needs], text: str) -> bool:
    return any(one.met(text, text.casefold()) for one in needs)


def drawn(pattern: re.Pattern[str], needs: Sequence[Needs], examples: int = 12) -> None:
    """Texts in which the pattern finds something meet the needs."""

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(st.from_regex(pattern), st.sampled_from(["", "a text ", "x\n"]))
    def hold(found: str, before: str) -> None:
        if pattern.search(before + found):
            assert meets(needs, before + found), (pattern.pattern, before + found)

    hold()


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_all_that_a_pattern_finds_meets_its_needs(number: int) -> None:
    drawn(FORMS[number].pattern, FORMS[number].needs)


@pytest.mark.parametrize(("module", "name"), DETECTORS)
def test_all_that_a_detector_finds_meets_its_needs(module: str, name: str) -> None:
    plugin = getattr(pytest.importorskip(f"detect_secrets.plugins.{module}"), name)()
    for pattern in plugin.denylist:
        drawn(pattern, DETECTORS[module, name])
    secret = PLANTED[name]
    assert list(plugin.analyze_string(secret)), "the planted one is none"
    assert meets(DETECTORS[module, name], f"before {secret} after")


def test_of_the_letters_that_fold_alike_none_is_missed() -> None:
    """A long s and the sign of kelvin are letters of a pattern without case."""
    for text in ("pa\u017fsword=hunter22", "api_\u212aey: abcdef12"):
        assert re.search("<secret#", Masking(b"key").text(text))


def test_plain_text_meets_no_need() -> None:
    """Or nothing is spared."""
    text = "You are in a hall. There is a door to the east and a lamp. The lamp is brass (3 of 4). Your score is 12."
    assert not [form.kind for form in FORMS if meets(form.needs, text)]
    assert not [name for name, needs in DETECTORS.items() if meets(needs, text)]


def test_no_mask_meets_a_need() -> None:
    masks = " ".join(f"<{kind}#0a1b2c3d>" for kind in sorted({form.kind for form in FORMS}))
    assert not [name for name, needs in DETECTORS.items() if meets(needs, masks)]


def test_a_secret_of_each_detector_is_masked_wherever_it_is_in_an_episode() -> None:
    """Each in one text of an episode whose other texts hold none: what is asked of all texts must hold for the one."""
    pytest.importorskip("detect_secrets")
    for name, secret in PLANTED.items():
        for place in range(4):
            texts = [f"plain {k}" for k in range(4)]
            texts[place] = f"it says {secret}\nand more"
            turns = (Turn("look", texts[0], 0.0, False), Turn(texts[1], "seen", 0.0, False, {"log.note": texts[2]}))
            episode = Trajectory("e", "t", "g", Source.REAL, "a", 0, texts[3], turns, StopReason.TURN_LIMIT)
            masked = repr(Masking(b"key").masked(episode))
            assert secret.strip() not in masked, (name, place)
            assert "it says" in masked
            assert "and more" in masked
