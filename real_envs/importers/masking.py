"""Secrets in logs, masked before anything is stored: what a world model learns, it may tell.

A mask names the kind and is the same for the same secret within a run, so that a masked address is still one and the
same address: ``<email#3f9a1c22>``. The code is a keyed hash, and the key lies in the run's folder beside the log, not
in it: who has only the log cannot try out guesses.

Found are, by the patterns below: e-mail addresses; cookies and authorization headers; passwords in URLs; values beside
a key such as ``api_key=`` or ``"password":``; tokens of well-known forms. Where the package detect-secrets is installed
(``pip install 'imagination[secrets]'``), its detectors of tokens with a form of their own look, too; those that guess
by randomness do not, as hashes and ids are the daily bread of such logs.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from real_envs.trajectory import Trajectory

_NAMES = [
    f"{first}{between}{second}"
    for first, second in (
        ("api", "key"),
        ("access", "token"),
        ("auth", "token"),
        ("refresh", "token"),
        ("client", "secret"),
        ("session", "id"),
        ("secret", "key"),
    )
    for between in ("", "_", "-")
]
Pattern = tuple[str, tuple[str, ...], re.Pattern[str]]
# Kind, words, and a pattern whose group is the secret (all of it where there is no group). In a text that has none of
# the words, in whatever case, the pattern finds nothing: looking for them costs a tenth of the search.
PATTERNS: tuple[Pattern, ...] = (
    (
        "private-key",
        ("-----begin ",),
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    ),
    ("cookie", ("cookie",), re.compile(r"\b(?:Set-)?Cookie\s*:\s*([\w.-]{1,64}=[^\r\n]+)", re.I)),
    (
        "token",
        ("authorization",),
        re.compile(r"\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]{8,})", re.I),
    ),
    ("token", ("bearer",), re.compile(r"\bBearer\s+([\w.~+/=-]{16,})")),
    ("token", ("eyj",), re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")),  # JSON web token
    (
        "api-key",
        ("sk-", "sk_", "pk-", "pk_", "rk-", "rk_"),
        re.compile(r"\b(?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{20,}"),
    ),
    ("api-key", ("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ("api-key", ("aiza",), re.compile(r"\bAIza[\w-]{35}")),
    ("token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}")),
    ("token", ("github_pat_",), re.compile(r"\bgithub_pat_\w{40,}")),
    ("token", ("hf_",), re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    ("token", ("glpat-",), re.compile(r"\bglpat-[\w-]{20,}")),
    ("token", ("xox",), re.compile(r"\bxox[abprs]-[\w-]{10,}")),
    ("password", ("://",), re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,100}:([^\s/@]{1,200})@", re.I)),
    (
        "secret",
        (*_NAMES, "passwd", "password"),
        re.compile(
            r"\b(?:api[_-]?key|access[_-]?token|auth[_-]?token|refresh[_-]?token|client[_-]?secret|session[_-]?id|"
            r"passwd|password|secret[_-]?key)[\"']?\s*[:=]\s*[\"']?([^\s\"',;&<>]{6,})",
            re.I,
        ),
    ),
    ("email", ("@",), re.compile(r"\b[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")),
)
_TOKEN = 20  # characters of the shortest token that the detectors know by its form
_MASK = re.compile(r"<[a-z-]+#[0-9a-f]{8}>")
# Of detect-secrets: those whose tokens have a form of their own.
_DETECTORS = {
    "artifactory": "ArtifactoryDetector",
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector",
    "npm": "NpmDetector",
    "openai": "OpenAIDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}


class Masking:
    """Masks episodes and counts what it found.

    Attributes:
        found: distinct secrets by kind.
        scanner: whether detect-secrets looks, too.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[str, str] = {}  # secret to mask
        self._detectors = _detectors()

    @property
    def scanner(self) -> bool:
        return bool(self._detectors)

    @property
    def found(self) -> Mapping[str, int]:
        return Counter(mask[1:].partition("#")[0] for mask in self._known.values())

    def masked(self, episode: Trajectory) -> Trajectory:
        """The episode with all its texts masked; ids and names of tasks and agents stay."""
        notes = [value for turn in episode.turns for value in turn.info.values() if isinstance(value, str)]
        said = [text for turn in episode.turns for text in (turn.action, turn.observation)]
        found = _possible("\n".join([episode.start, *episode.world_facts, *said, *notes]))  # once for all its texts
        if not found and not self._detectors:
            return episode
        turns = tuple(
            replace(
                turn,
                action=self._masked(turn.action, found),
                observation=self._masked(turn.observation, found),
                info={
                    key: self._masked(value, found) if isinstance(value, str) else value
                    for key, value in turn.info.items()
                },
            )
            for turn in episode.turns
        )
        facts = tuple(self._masked(fact, found) for fact in episode.world_facts)
        return replace(episode, start=self._masked(episode.start, found), turns=turns, world_facts=facts)

    def text(self, text: str) -> str:
        """The text with masks in place of secrets; a mask is never masked again."""
        return self._masked(text, _possible(text))

    def _masked(self, text: str, possible: Sequence[Pattern]) -> str:
        if possible:
            folded = text.casefold()
            for kind, words, pattern in possible:
                if any(map(folded.__contains__, words)):
                    text = pattern.sub(lambda found, kind=kind: self._put(found, kind), text)  # type: ignore[misc]
        if not self._detectors or not _may_hold_tokens(text):
            return text
        for detector in self._detectors:
            for secret in {part for part in detector.analyze_string(text) if isinstance(part, str) and len(part) > 7}:
                if secret in text and not _MASK.search(secret):
                    text = text.replace(secret, self._mask(secret, "token"))
        return text

    def _put(self, found: re.Match[str], kind: str) -> str:
        whole = found[0]
        secret = found[1] if found.re.groups else whole
        if _MASK.fullmatch(secret.rstrip(".,")):
            return whole
        begin = (found.start(1) if found.re.groups else found.start()) - found.start()
        return whole[:begin] + self._mask(secret, kind) + whole[begin + len(secret) :]

    def _mask(self, secret: str, kind: str) -> str:
        if secret not in self._known:
            code = hmac.new(self._key, secret.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:8]
            self._known[secret] = f"<{kind}#{code}>"
        return self._known[secret]


def _possible(text: str) -> list[Pattern]:
    """The patterns of which the text has a word."""
    folded = text.casefold()
    return [pattern for pattern in PATTERNS if any(map(folded.__contains__, pattern[1]))]


def _may_hold_tokens(text: str) -> bool:
    """Whether the detectors can find anything: their tokens are long words, but for two that begin as here."""
    return "AKC" in text or "AP" in text or "xox" in text.lower() or max(map(len, text.split()), default=0) >= _TOKEN


def _detectors() -> Iterable[Any]:
    found = []
    for module, name in _DETECTORS.items():
        try:
            plugin = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name, None)
        except ImportError:
            continue
        if plugin is not None:
            found.append(plugin())
    return tuple(found)
