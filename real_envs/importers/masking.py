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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from real_envs.trajectory import Trajectory

# Kind, and a pattern whose group is the secret (all of it where there is no group).
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("private-key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S)),
    ("cookie", re.compile(r"\b(?:Set-)?Cookie\s*:\s*([\w.-]{1,64}=[^\r\n]+)", re.I)),
    (
        "token",
        re.compile(r"\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]{8,})", re.I),
    ),
    ("token", re.compile(r"\bBearer\s+([\w.~+/=-]{16,})")),
    ("token", re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")),  # JSON web token
    ("api-key", re.compile(r"\b(?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{20,}")),
    ("api-key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ("api-key", re.compile(r"\bAIza[\w-]{35}")),
    ("token", re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}")),
    ("token", re.compile(r"\bgithub_pat_\w{40,}")),
    ("token", re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    ("token", re.compile(r"\bglpat-[\w-]{20,}")),
    ("token", re.compile(r"\bxox[abprs]-[\w-]{10,}")),
    ("password", re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,100}:([^\s/@]{1,200})@", re.I)),
    (
        "secret",
        re.compile(
            r"\b(?:api[_-]?key|access[_-]?token|auth[_-]?token|refresh[_-]?token|client[_-]?secret|session[_-]?id|"
            r"passwd|password|secret[_-]?key)[\"']?\s*[:=]\s*[\"']?([^\s\"',;&<>]{6,})",
            re.I,
        ),
    ),
    ("email", re.compile(r"\b[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")),
)
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
        turns = tuple(
            replace(
                turn,
                action=self.text(turn.action),
                observation=self.text(turn.observation),
                info={key: self.text(value) if isinstance(value, str) else value for key, value in turn.info.items()},
            )
            for turn in episode.turns
        )
        facts = tuple(map(self.text, episode.world_facts))
        return replace(episode, start=self.text(episode.start), turns=turns, world_facts=facts)

    def text(self, text: str) -> str:
        """The text with masks in place of secrets; a mask is never masked again."""
        for kind, pattern in PATTERNS:
            text = pattern.sub(lambda found, kind=kind: self._put(found, kind), text)  # type: ignore[misc]
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
