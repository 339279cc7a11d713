"""Secrets in logs, masked before anything is stored: what a world model learns, it may tell.

A mask names the kind and is the same for the same secret within a run, so that a masked address is still one and the
same address: ``<email#3f9a1c22>``. The code is a keyed hash, and the key lies in the run's folder beside the log, not
in it: who has only the log cannot try out guesses.

Found are, by the patterns of ``secret_forms``: e-mail addresses; cookies and authorization headers; passwords in URLs;
values beside a key such as ``api_key=`` or ``"password":``; tokens of well-known forms. Where the package
detect-secrets is installed (``pip install 'imagination[secrets]'``), its detectors of tokens with a form of their own
look, too; those that guess by randomness do not, as hashes and ids are the daily bread of such logs.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from real_envs.importers.secret_forms import DETECTORS, FORMS, Form, Needs
from real_envs.trajectory import Trajectory, Turn

_TOKEN = 20  # characters of the shortest token that the detectors know by its form
_SHORTEST = 8  # characters of what is taken for a secret
_MASK = re.compile(r"<[a-z-]+#[0-9a-f]{8}>")
_FORM_NEEDS = [(one, at) for at, form in enumerate(FORMS) for one in form.needs]
Detector = tuple[tuple[Needs, ...], Any]  # of detect-secrets, and one of which needs its tokens meet


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
        self._detector_needs = [(one, at) for at, found in enumerate(self._detectors) for one in found[0]]

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
        forms, detectors = self._possible("\n".join([episode.start, *episode.world_facts, *said, *notes]))
        if not forms and not detectors:  # once for all its texts
            return episode

        def masked(text: str) -> str:
            return self._masked(text, forms, detectors)

        def turn_masked(turn: Turn) -> Turn:
            info = {key: masked(value) if isinstance(value, str) else value for key, value in turn.info.items()}
            action, seen = masked(turn.action), masked(turn.observation)
            unchanged = action is turn.action and seen is turn.observation and info == turn.info
            return turn if unchanged else replace(turn, action=action, observation=seen, info=info)

        facts = tuple(map(masked, episode.world_facts))
        turns = tuple(map(turn_masked, episode.turns))
        return replace(episode, start=masked(episode.start), turns=turns, world_facts=facts)

    def text(self, text: str) -> str:
        """The text with masks in place of secrets; a mask is never masked again."""
        return self._masked(text, *self._possible(text))

    def _possible(self, text: str) -> tuple[list[Form], list[Detector]]:
        """The forms and detectors whose needs the text meets."""
        folded = text.casefold()
        forms = dict.fromkeys(at for needs, at in _FORM_NEEDS if needs.met(text, folded))
        detectors = dict.fromkeys(at for needs, at in self._detector_needs if needs.met(text, folded))
        return [FORMS[at] for at in forms], [self._detectors[at] for at in detectors]

    def _masked(self, text: str, forms: Sequence[Form], detectors: Sequence[Detector]) -> str:
        folded = text.casefold()
        for form in forms:
            if _met(form.needs, text, folded):
                text = form.pattern.sub(lambda found, kind=form.kind: self._put(found, kind), text)  # type: ignore[misc]
        looking = [detector for needs, detector in detectors if _met(needs, text, folded)]
        if not looking or not _may_hold_tokens(text):
            return text
        for detector in looking:
            for secret in _secrets(detector, text):
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


def _met(needs: Sequence[Needs], text: str, folded: str) -> bool:
    return any(one.met(text, folded) for one in needs)


def _secrets(detector: Any, text: str) -> set[str]:
    """What a detector finds. Some tell the group that a token begins with, such as ``gldt``: then all of the token."""
    found = set(detector.analyze_string(text))
    if any(len(part) < _SHORTEST for part in found):
        found |= {match[0] for pattern in detector.denylist for match in pattern.finditer(text)}
    return {part for part in found if len(part) >= _SHORTEST}


def _may_hold_tokens(text: str) -> bool:
    """Whether the detectors can find anything: their tokens are long words, but for two that begin as here."""
    return "AKC" in text or "AP" in text or "xox" in text.lower() or max(map(len, text.split()), default=0) >= _TOKEN


def _detectors() -> tuple[Detector, ...]:
    found = []
    for (module, name), needs in DETECTORS.items():
        try:
            plugin = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name, None)
        except ImportError:
            continue
        if plugin is not None:
            found.append((needs, plugin()))
    return tuple(found)
