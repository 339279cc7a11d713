"""Secrets do not get into a log. If these fail, a world model may tell somebody's password.

The secrets are made up, and put together here so that no scanner of this repository finds them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from real_envs.importers.masking import DETECTORS, PATTERNS, Masking, Prefilter
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

LETTERS = "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2Yz3"


@pytest.mark.parametrize(
    ("kind", "text", "secret"),
    [
        ("email", "write to ada.b+c@mail.example.org, please", "ada.b+c@mail.example.org"),
        ("cookie", "Cookie: sid=abc; theme=dark\nnext", "sid=abc; theme=dark"),
        ("token", "Authorization: " + "Bearer " + LETTERS, LETTERS),
        ("token", "use eyJ" + LETTERS[:20] + ".eyJ" + LETTERS[:20] + "." + LETTERS[:20], "eyJ" + LETTERS[:20]),
        ("api-key", "key sk" + "-proj-" + LETTERS, "sk-proj-" + LETTERS),
        ("api-key", "AK" + "IA" + "ABCDEFGHIJKLMNOP", "AKIA" + "ABCDEFGHIJKLMNOP"),
        ("token", "git gh" + "p_" + LETTERS[:38], "ghp_" + LETTERS[:38]),
        ("password", "postgres://ada:s3cr3t-x@db/x", "s3cr3t-x"),
        ("secret", '{"api_key": "abcd-1234"}', "abcd-1234"),
        ("secret", "password=hunter22&next=/", "hunter22"),
        ("private-key", "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
    ],
)
def test_a_secret_is_masked_and_what_stands_around_it_stays(kind: str, text: str, secret: str) -> None:
    masked = Masking(b"key").text(text)
    assert secret not in masked
    assert re.search(rf"<{kind}#[0-9a-f]{{8}}>", masked)
    assert masked[:4] in (text[:4], "<api", "<pri")
    assert Masking(b"key").text(masked) == masked  # once more changes nothing


@pytest.mark.parametrize(
    "text",
    [
        "f32a3a97638afeb2ee2a15cfe335ab72  /testbed/Hello.java",
        "user id mia_li_3668, reservation JMO1MG, 2024-05-20",
        "[12]<input id=password placeholder=Password />",
        "Cookie: chocolate chip, 12 pieces",
        "B08H5DCD65 costs $9.98 @ shop",
        "skirt-with-a-very-long-name-for-a-product",
        "He asked for the token of his appreciation.",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    masking = Masking(b"key")
    assert masking.text(text) == text
    assert masking.counts == {}


def test_masks_are_stable_within_a_key_and_no_one_elses_to_guess() -> None:
    first, again, other = Masking(b"one"), Masking(b"one"), Masking(b"two")
    text = "a@b.org c@d.org a@b.org"
    a, c, a_again = first.text(text).split()
    assert a == a_again != c
    assert again.text(text) == first.text(text)
    assert other.text(text) != first.text(text)
    assert first.counts == {"email": 2}


def test_all_texts_of_an_episode_are_masked() -> None:
    secret = "ada@example.org"
    turn = Turn(f"mail {secret}", f"sent to {secret}", 1.0, True, {"log.user": secret, "log.n": 1.0})
    found = Trajectory(
        "e", "t", "g", Source.REAL, "a", 0, f"I am {secret}", (turn,), StopReason.TERMINATED, world_facts=(secret,)
    )
    masked = Masking(b"key").masked(found)
    assert secret not in repr(masked)
    assert masked.turns[0].info["log.n"] == 1.0
    assert masked.turns[0].reward == 1.0


def test_tokens_that_only_the_scanner_knows_are_masked_where_it_is_installed() -> None:
    pytest.importorskip("detect_secrets")
    masking = Masking(b"key")
    token = "SG." + LETTERS[:22] + "." + (LETTERS + LETTERS)[:43]
    assert token not in masking.text(f"mail with {token}")


def test_long_pages_are_masked_in_a_moment() -> None:
    page = "[12]<a-b.c-d />\n" * 20_000 + "a.b-c_" * 20_000
    before = time.perf_counter()
    Masking(b"key").text(page)
    assert time.perf_counter() - before < 10


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


def passes(prefilters: Sequence[Prefilter], text: str) -> bool:
    return any(one.passes(text, text.casefold()) for one in prefilters)


def drawn(pattern: re.Pattern[str], prefilters: Sequence[Prefilter], examples: int = 12) -> None:
    """Texts in which the pattern finds something pass the prefilters."""

    @settings(max_examples=examples, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(st.from_regex(pattern), st.sampled_from(["", "a text ", "x\n"]))
    def hold(found: str, before: str) -> None:
        if pattern.search(before + found):
            assert passes(prefilters, before + found), (pattern.pattern, before + found)

    hold()


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_all_that_a_pattern_finds_passes_its_prefilters(number: int) -> None:
    drawn(PATTERNS[number].pattern, PATTERNS[number].prefilters)


@pytest.mark.parametrize(("module", "name"), DETECTORS)
def test_all_that_a_detector_finds_passes_its_prefilters(module: str, name: str) -> None:
    plugin = getattr(pytest.importorskip(f"detect_secrets.plugins.{module}"), name)()
    for pattern in plugin.denylist:
        drawn(pattern, DETECTORS[module, name])
    secret = PLANTED[name]
    assert list(plugin.analyze_string(secret)), "the planted one is none"
    assert passes(DETECTORS[module, name], f"before {secret} after")


def test_of_the_letters_that_fold_alike_none_is_missed() -> None:
    """A long s and the sign of kelvin are letters of a pattern without case."""
    for text in ("pa\u017fsword=hunter22", "api_\u212aey: abcdef12"):
        assert re.search("<secret#", Masking(b"key").text(text))


def test_plain_text_passes_no_prefilter() -> None:
    """Or nothing is spared."""
    text = "You are in a hall. There is a door to the east and a lamp. The lamp is brass (3 of 4). Your score is 12."
    assert not [pattern.kind for pattern in PATTERNS if passes(pattern.prefilters, text)]
    assert not [name for name, prefilters in DETECTORS.items() if passes(prefilters, text)]


def test_no_mask_passes_a_prefilter() -> None:
    masks = " ".join(f"<{kind}#0a1b2c3d>" for kind in sorted({pattern.kind for pattern in PATTERNS}))
    assert not [name for name, prefilters in DETECTORS.items() if passes(prefilters, masks)]


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
