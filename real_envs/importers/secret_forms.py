"""What secrets look like, and what a text has to hold before it is worth looking for them.

Most texts hold no secret, and a pattern reads a text a hundred times more slowly than a word is looked for. So each
pattern comes with ``Needs``: what stands in all that it can find. They only spare work: a text that meets them may hold
nothing, and one that meets none holds nothing for sure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """A text meets them where it has a word of each clause, and the part where there is one.

    Attributes:
        clauses: those of one character first: they are looked for at the speed of memory.
        folded: the words are in lower case, and are looked for in the text without its case.
        part: begins with a plain character, to whose places Python's ``re`` skips at the speed of memory, too.
    """

    clauses: tuple[Words, ...] = ()
    folded: bool = False
    part: re.Pattern[str] | None = None

    def met(self, text: str, folded: str) -> bool:
        """
        Args:
            folded: the text without its case (``str.casefold``).
        """
        said = folded if self.folded else text
        for clause in self.clauses:
            for word in clause:
                if word in said:
                    break
            else:
                return False
        return self.part is None or self.part.search(text) is not None


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of secret: its pattern's group is the secret, or all of it where there is no group. It meets one need."""

    kind: str
    needs: tuple[Needs, ...]
    pattern: re.Pattern[str]


def _words(*clauses: Words, folded: bool = False) -> Needs:
    return Needs(clauses, folded)


def _part(pattern: str) -> Needs:
    return Needs(part=re.compile(pattern))


_FIRST = ("api", "access", "auth", "refresh", "client", "session", "secret")
_SECOND = ("key", "token", "token", "token", "secret", "id", "key")
_STATED = (":", "=")  # what stands between a name and its value


def _names(between: str) -> Words:
    return tuple(f"{first}{between}{second}" for first, second in zip(_FIRST, _SECOND, strict=True))


FORMS: tuple[Form, ...] = (
    Form(
        "private-key",
        (_words(("-",), ("-----BEGIN ",)),),
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    ),
    Form(
        "cookie",
        (_words((":",), ("=",), ("cookie",), folded=True),),
        re.compile(r"\b(?:Set-)?Cookie\s*:\s*([\w.-]{1,64}=[^\r\n]+)", re.I),
    ),
    Form(
        "token",
        (_words(_STATED, ("authorization",), folded=True),),
        re.compile(r"\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]{8,})", re.I),
    ),
    Form("token", (_part(r"B(?=earer\s)"),), re.compile(r"\bBearer\s+([\w.~+/=-]{16,})")),
    Form(  # JSON web token
        "token", (_words(("J",), ("eyJ",)),), re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")
    ),
    Form(
        "api-key",
        (_part(r"-[\w-]{20}"), _part(r"_[\w-]{20}")),
        re.compile(r"\b(?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{20,}"),
    ),
    Form("api-key", (_part(r"A(?:KIA|SIA)[0-9A-Z]{16}"),), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    Form("api-key", (_words(("z",), ("AIza",)),), re.compile(r"\bAIza[\w-]{35}")),
    Form("token", (_part(r"_[A-Za-z0-9]{36}"),), re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}")),
    Form("token", (_words(("_",), ("github_pat_",)),), re.compile(r"\bgithub_pat_\w{40,}")),
    Form("token", (_part(r"_[A-Za-z0-9]{30}"),), re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    Form("token", (_words(("-",), ("glpat-",)),), re.compile(r"\bglpat-[\w-]{20,}")),
    Form("token", (_words(("-",), ("xox",)),), re.compile(r"\bxox[abprs]-[\w-]{10,}")),
    Form(
        "password",
        (_words(("@",), ("://",)),),
        re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,100}:([^\s/@]{1,200})@", re.I),
    ),
    Form(
        "secret",
        (
            _words(_STATED, ("_",), _names("_"), folded=True),
            _words(_STATED, ("-",), _names("-"), folded=True),
            _words(_STATED, (*_names(""), "passw"), folded=True),
        ),
        re.compile(
            r"\b(?:api[_-]?key|access[_-]?token|auth[_-]?token|refresh[_-]?token|client[_-]?secret|session[_-]?id|"
            r"passwd|password|secret[_-]?key)[\"']?\s*[:=]\s*[\"']?([^\s\"',;&<>]{6,})",
            re.I,
        ),
    ),
    Form("email", (_words(("@",)),), re.compile(r"\b[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")),
)

# Of detect-secrets 1.5: those whose tokens have a form of their own, by module and class; each meets one of the needs.
# No mask meets any that the text around it does not: the needs may be asked before masks are put.
DETECTORS: dict[tuple[str, str], tuple[Needs, ...]] = {
    ("artifactory", "ArtifactoryDetector"): (_part(r"A(?:KC|P[\dABCDEF])[a-zA-Z0-9]{8}"),),
    ("aws", "AWSKeyDetector"): (
        _part(r"A(?:3T|BIA|CCA|KIA|SIA)[0-9A-Z]{16}"),
        _words(("'", '"'), ("aws",), folded=True),
    ),
    ("azure_storage_key", "AzureStorageKeyDetector"): (_words(("=",), ("AccountKey=",)),),
    ("discord", "DiscordBotTokenDetector"): (_part(r"\.[a-zA-Z\d_-]{6}\.[a-zA-Z\d_-]{27}"),),
    ("github_token", "GitHubTokenDetector"): (_part(r"_[A-Za-z0-9_]{36}"),),
    ("gitlab_token", "GitLabTokenDetector"): (
        _words(("-",), ("gl",), ("pat-", "dt-", "ft-", "oat-", "rt-", "cbt-", "imt-", "ptt-", "agent-", "oas-")),
        _words(("GR1348941",)),
    ),
    ("jwt", "JwtTokenDetector"): (_words(("J",), ("eyJ",)),),
    ("mailchimp", "MailchimpDetector"): (_words(("-",), ("-us",)),),
    ("npm", "NpmDetector"): (_words(("_",), (":_authToken=",)),),
    ("openai", "OpenAIDetector"): (_words(("J",), ("T3BlbkFJ",)),),
    ("pypi_token", "PypiTokenDetector"): (_words(("-",), ("pypi-A",)),),
    ("sendgrid", "SendGridDetector"): (_part(r"S(?=G\.)"),),
    ("slack", "SlackDetector"): (
        _words(("-",), ("xox",), folded=True),
        _words(("/",), ("hooks.slack.com",), folded=True),
    ),
    ("square_oauth", "SquareOAuthDetector"): (_words(("-",), ("sq0csp-",)),),
    ("stripe", "StripeDetector"): (_words(("_",), ("k_live_",)),),
    ("telegram_token", "TelegramBotTokenDetector"): (_part(r":[0-9A-Za-z_-]{35}"),),
    ("twilio", "TwilioKeyDetector"): (_part(r"A(?=C[a-z0-9]{32})"), _part(r"S(?=K[a-z0-9]{32})")),
}
