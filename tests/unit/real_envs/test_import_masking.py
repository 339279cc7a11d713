"""Secrets do not get into a log. If these fail, a world model may tell somebody's password.

The secrets are made up, and put together here so that no scanner of this repository finds them.
"""

from __future__ import annotations

import re
import time

import pytest

from real_envs.importers.masking import Masking
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
    assert masking.found == {}


def test_masks_are_stable_within_a_key_and_no_one_elses_to_guess() -> None:
    first, again, other = Masking(b"one"), Masking(b"one"), Masking(b"two")
    text = "a@b.org c@d.org a@b.org"
    a, c, a_again = first.text(text).split()
    assert a == a_again != c
    assert again.text(text) == first.text(text)
    assert other.text(text) != first.text(text)
    assert first.found == {"email": 2}


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
    assert masking.scanner
    assert token not in masking.text(f"mail with {token}")


def test_long_pages_are_masked_in_a_moment() -> None:
    page = "[12]<a-b.c-d />\n" * 20_000 + "a.b-c_" * 20_000
    before = time.perf_counter()
    Masking(b"key").text(page)
    assert time.perf_counter() - before < 10
