"""Masks secrets in logs before anything is stored, because a world model may repeat what it learned.

A mask names the kind of the secret: ``<email#3f9a1c22>``. The code is an HMAC of the secret, so the same secret has the
same mask within a run. The key lies in the run's folder, not in the log: who has only the log cannot test guesses.

Masked are e-mail addresses; cookies and authorization headers; passwords in URLs; values beside a key such as
``api_key=`` or ``"password":``; tokens of known forms. The detectors of detect-secrets run as well where the package is
installed (``pip install 'imagination[secrets]'``), except those that detect randomness: hashes and ids are common in
logs.

A regular expression costs a hundred times more than a substring search, and most texts hold no secret. So each pattern
comes with ``Prefilter`` objects: cheap conditions that hold in every text in which the pattern finds something.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from real_envs.trajectory import Trajectory, Turn

_TOKEN = 20  # characters of the shortest token that the detectors know by its form
_SHORTEST = 8  # characters of the shortest text that counts as a secret
_MASK = re.compile(r"<[a-z-]+#[0-9a-f]{8}>")


@dataclass(frozen=True, slots=True)
class Prefilter:
    """Passes a text that has one word of each clause, and a match of ``part`` if there is one."""

    # alternatives of words. Clauses of single characters come first: they are searched fastest.
    clauses: tuple[tuple[str, ...], ...] = ()
    folded: bool = False  # whether the words are searched in the case-folded text
    part: re.Pattern[str] | None = None  # begins with a literal character, which ``re`` finds fast as well

    def passes(self, text: str, folded: str) -> bool:
        """``folded`` is ``text.casefold()``."""
        searched = folded if self.folded else text
        for clause in self.clauses:
            for word in clause:
                if word in searched:
                    break
            else:
                return False
        return self.part is None or self.part.search(text) is not None


@dataclass(frozen=True, slots=True)
class SecretPattern:
    """A kind of secret. The secret is the group of ``pattern``, or the whole match where it has none.

    Every text with a match passes at least one of ``prefilters``.
    """

    kind: str
    prefilters: tuple[Prefilter, ...]
    pattern: re.Pattern[str]


def _has(*clauses: tuple[str, ...], folded: bool = False) -> Prefilter:
    return Prefilter(clauses, folded)


def _begins(pattern: str) -> Prefilter:
    return Prefilter(part=re.compile(pattern))


_NAME_FIRST = ("api", "access", "auth", "refresh", "client", "session", "secret")
_NAME_SECOND = ("key", "token", "token", "token", "secret", "id", "key")
_ASSIGNS = (":", "=")  # what stands between a name and its value


def _names(between: str) -> tuple[str, ...]:
    return tuple(f"{first}{between}{second}" for first, second in zip(_NAME_FIRST, _NAME_SECOND, strict=True))


PATTERNS: tuple[SecretPattern, ...] = (
    SecretPattern(
        "private-key",
        (_has(("-",), ("-----BEGIN ",)),),
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    ),
    SecretPattern(
        "cookie",
        (_has((":",), ("=",), ("cookie",), folded=True),),
        re.compile(r"\b(?:Set-)?Cookie\s*:\s*([\w.-]{1,64}=[^\r\n]+)", re.I),
    ),
    SecretPattern(
        "token",
        (_has(_ASSIGNS, ("authorization",), folded=True),),
        re.compile(r"\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]{8,})", re.I),
    ),
    SecretPattern("token", (_begins(r"B(?=earer\s)"),), re.compile(r"\bBearer\s+([\w.~+/=-]{16,})")),
    SecretPattern(  # JSON web token
        "token", (_has(("J",), ("eyJ",)),), re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")
    ),
    SecretPattern(
        "api-key",
        (_begins(r"-[\w-]{20}"), _begins(r"_[\w-]{20}")),
        re.compile(r"\b(?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{20,}"),
    ),
    SecretPattern("api-key", (_begins(r"A(?:KIA|SIA)[0-9A-Z]{16}"),), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    SecretPattern("api-key", (_has(("z",), ("AIza",)),), re.compile(r"\bAIza[\w-]{35}")),
    SecretPattern("token", (_begins(r"_[A-Za-z0-9]{36}"),), re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}")),
    SecretPattern("token", (_has(("_",), ("github_pat_",)),), re.compile(r"\bgithub_pat_\w{40,}")),
    SecretPattern("token", (_begins(r"_[A-Za-z0-9]{30}"),), re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    SecretPattern("token", (_has(("-",), ("glpat-",)),), re.compile(r"\bglpat-[\w-]{20,}")),
    SecretPattern("token", (_has(("-",), ("xox",)),), re.compile(r"\bxox[abprs]-[\w-]{10,}")),
    SecretPattern(
        "password",
        (_has(("@",), ("://",)),),
        re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,100}:([^\s/@]{1,200})@", re.I),
    ),
    SecretPattern(
        "secret",
        (
            _has(_ASSIGNS, ("_",), _names("_"), folded=True),
            _has(_ASSIGNS, ("-",), _names("-"), folded=True),
            _has(_ASSIGNS, (*_names(""), "passw"), folded=True),
        ),
        re.compile(
            r"\b(?:api[_-]?key|access[_-]?token|auth[_-]?token|refresh[_-]?token|client[_-]?secret|session[_-]?id|"
            r"passwd|password|secret[_-]?key)[\"']?\s*[:=]\s*[\"']?([^\s\"',;&<>]{6,})",
            re.I,
        ),
    ),
    SecretPattern(
        "email", (_has(("@",)),), re.compile(r"\b[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
    ),
)

# Detectors of detect-secrets 1.5 whose tokens have a fixed form, by module and class. Each token passes a prefilter.
# Masks never pass a prefilter that the text around them fails, so it may be applied before masking.
DETECTORS: dict[tuple[str, str], tuple[Prefilter, ...]] = {
    ("artifactory", "ArtifactoryDetector"): (_begins(r"A(?:KC|P[\dABCDEF])[a-zA-Z0-9]{8}"),),
    ("aws", "AWSKeyDetector"): (
        _begins(r"A(?:3T|BIA|CCA|KIA|SIA)[0-9A-Z]{16}"),
        _has(("'", '"'), ("aws",), folded=True),
    ),
    ("azure_storage_key", "AzureStorageKeyDetector"): (_has(("=",), ("AccountKey=",)),),
    ("discord", "DiscordBotTokenDetector"): (_begins(r"\.[a-zA-Z\d_-]{6}\.[a-zA-Z\d_-]{27}"),),
    ("github_token", "GitHubTokenDetector"): (_begins(r"_[A-Za-z0-9_]{36}"),),
    ("gitlab_token", "GitLabTokenDetector"): (
        _has(("-",), ("gl",), ("pat-", "dt-", "ft-", "oat-", "rt-", "cbt-", "imt-", "ptt-", "agent-", "oas-")),
        _has(("GR1348941",)),
    ),
    ("jwt", "JwtTokenDetector"): (_has(("J",), ("eyJ",)),),
    ("mailchimp", "MailchimpDetector"): (_has(("-",), ("-us",)),),
    ("npm", "NpmDetector"): (_has(("_",), (":_authToken=",)),),
    ("openai", "OpenAIDetector"): (_has(("J",), ("T3BlbkFJ",)),),
    ("pypi_token", "PypiTokenDetector"): (_has(("-",), ("pypi-A",)),),
    ("sendgrid", "SendGridDetector"): (_begins(r"S(?=G\.)"),),
    ("slack", "SlackDetector"): (_has(("-",), ("xox",), folded=True), _has(("/",), ("hooks.slack.com",), folded=True)),
    ("square_oauth", "SquareOAuthDetector"): (_has(("-",), ("sq0csp-",)),),
    ("stripe", "StripeDetector"): (_has(("_",), ("k_live_",)),),
    ("telegram_token", "TelegramBotTokenDetector"): (_begins(r":[0-9A-Za-z_-]{35}"),),
    ("twilio", "TwilioKeyDetector"): (_begins(r"A(?=C[a-z0-9]{32})"), _begins(r"S(?=K[a-z0-9]{32})")),
}


Detector = tuple[tuple[Prefilter, ...], Any]  # with a plugin of detect-secrets


class Masking:
    """Masks episodes and counts the secrets in them; ``key`` is that of the HMAC."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._masks: dict[str, str] = {}  # by secret
        detectors = _detectors()
        self._patterns = [(one, pattern) for pattern in PATTERNS for one in pattern.prefilters]
        self._detectors = [(one, detector) for detector in detectors for one in detector[0]]

    @property
    def counts(self) -> Mapping[str, int]:
        """Distinct secrets by kind."""
        return Counter(mask[1:].partition("#")[0] for mask in self._masks.values())

    def masked(self, episode: Trajectory) -> Trajectory:
        """The episode with all its texts masked; ids and names of tasks and agents stay."""
        notes = [value for turn in episode.turns for value in turn.info.values() if isinstance(value, str)]
        texts = [text for turn in episode.turns for text in (turn.action, turn.observation)]
        patterns, detectors = self._candidates(
            "\n".join([episode.start, episode.failure or "", *episode.world_facts, *texts, *notes])
        )
        if not patterns and not detectors:  # one check for all its texts
            return episode

        def masked(text: str) -> str:
            return self._masked(text, patterns, detectors)

        def turn_masked(turn: Turn) -> Turn:
            info = {key: masked(value) if isinstance(value, str) else value for key, value in turn.info.items()}
            action, observation = masked(turn.action), masked(turn.observation)
            unchanged = action is turn.action and observation is turn.observation and info == turn.info
            return turn if unchanged else replace(turn, action=action, observation=observation, info=info)

        facts = tuple(map(masked, episode.world_facts))
        turns = tuple(map(turn_masked, episode.turns))
        failure = None if episode.failure is None else masked(episode.failure)
        return replace(episode, start=masked(episode.start), turns=turns, world_facts=facts, failure=failure)

    def text(self, text: str) -> str:
        """The text with masks in place of secrets; a mask is never masked again."""
        return self._masked(text, *self._candidates(text))

    def _candidates(self, text: str) -> tuple[Iterable[SecretPattern], Iterable[Detector]]:
        """The patterns and detectors whose prefilters the text passes."""
        folded = text.casefold()
        patterns = {id(pattern): pattern for one, pattern in self._patterns if one.passes(text, folded)}
        detectors = {id(detector): detector for one, detector in self._detectors if one.passes(text, folded)}
        return patterns.values(), detectors.values()

    def _masked(self, text: str, patterns: Iterable[SecretPattern], detectors: Iterable[Detector]) -> str:
        folded = text.casefold()
        for secret in patterns:
            if _passes(secret.prefilters, text, folded):
                text = secret.pattern.sub(lambda match, kind=secret.kind: self._replacement(match, kind), text)  # type: ignore[misc]
        plugins = [plugin for prefilters, plugin in detectors if _passes(prefilters, text, folded)]
        if not plugins or not _may_hold_tokens(text):
            return text
        for plugin in plugins:
            for token in _tokens(plugin, text):
                if token in text and not _MASK.search(token):
                    text = text.replace(token, self._mask(token, "token"))
        return text

    def _replacement(self, match: re.Match[str], kind: str) -> str:
        """The whole match with a mask in place of the secret in it."""
        whole, group = match[0], min(1, match.re.groups)
        secret = match[group]
        if _MASK.fullmatch(secret.rstrip(".,")):
            return whole
        begin = match.start(group) - match.start()
        return whole[:begin] + self._mask(secret, kind) + whole[begin + len(secret) :]

    def _mask(self, secret: str, kind: str) -> str:
        if secret not in self._masks:
            code = hmac.new(self._key, secret.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:8]
            self._masks[secret] = f"<{kind}#{code}>"
        return self._masks[secret]


def _passes(prefilters: Iterable[Prefilter], text: str, folded: str) -> bool:
    return any(one.passes(text, folded) for one in prefilters)


def _tokens(plugin: Any, text: str) -> set[str]:
    """What a detector finds. Some return the group at the token's beginning, such as ``gldt``: then the whole match."""
    tokens = set(plugin.analyze_string(text))
    if any(len(part) < _SHORTEST for part in tokens):
        tokens |= {match[0] for pattern in plugin.denylist for match in pattern.finditer(text)}
    return {part for part in tokens if len(part) >= _SHORTEST}


def _may_hold_tokens(text: str) -> bool:
    """Whether the detectors can find anything: their tokens are long words, except for the three prefixes here."""
    return "AKC" in text or "AP" in text or "xox" in text.lower() or max(map(len, text.split()), default=0) >= _TOKEN


def _detectors() -> list[Detector]:
    """Those of the installed detect-secrets; none without it."""
    detectors = []
    for (module, name), prefilters in DETECTORS.items():
        try:
            plugin = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name, None)
        except ImportError:
            continue
        if plugin is not None:
            detectors.append((prefilters, plugin()))
    return detectors
