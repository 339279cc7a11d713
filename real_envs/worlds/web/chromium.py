"""What BrowserGym needs: its suites, and the system's Chromium, found or asked for and never downloaded.

BrowserGym starts two browsers at each reset, one for the page and one for the chat, which takes three seconds. A
context of its own is all that an episode needs, so here both get one in the same browser, which stays open.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from typing import Any

from real_envs.errors import UserError

# The shell has no windows to draw: a reset takes half the time.
_NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
_LOOPBACK_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
_ADVICE = "install it (Debian: apt-get install chromium-headless-shell, or chromium), or set CHROMIUM to its path"


def find_chromium() -> str:
    """The path of ``$CHROMIUM``, or of the first Chromium or Chrome on the path.

    Raises:
        UserError: there is none; the message says what to do.
    """
    wanted = os.environ.get("CHROMIUM", "")
    executable = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, _NAMES)), None)
    if not executable:
        raise UserError(f"there is no Chromium{f' at CHROMIUM={wanted}' if wanted else ''}: {_ADVICE}")
    return executable


class KeptBrowser:
    """Stands before Playwright for BrowserGym: whatever it launches is one browser, started at the first use.

    Args:
        still: pages show no animations (``prefers-reduced-motion``; jQuery's are off), so that what one sees after an
            action does not depend on how fast the machine is.
        offline: pages reach this machine alone.
    """

    def __init__(self, executable: str, still: bool = True, offline: bool = False) -> None:
        from playwright.sync_api import sync_playwright

        self._executable, self._still, self._offline = executable, still, offline
        self._playwright = sync_playwright().start()
        self._browser: Any = None
        self.chromium = self  # BrowserGym calls playwright.chromium.launch

    @property
    def selectors(self) -> Any:
        return self._playwright.selectors

    def launch(self, **named: Any) -> _Contexts:
        """Raises ``UserError`` where the browser does not start."""
        from playwright.sync_api import Error

        if self._browser is None or not self._browser.is_connected():
            named.pop("executable_path", None)
            if self._offline:
                named["args"] = [*(named.get("args") or ()), _LOOPBACK_ONLY]
            try:
                self._browser = self._playwright.chromium.launch(executable_path=self._executable, **named)
            except Error as error:
                raise UserError(f"{self._executable} does not start ({_first_line(error)}): {_ADVICE}") from None
        return _Contexts(self._browser, self._still)

    def end(self) -> None:
        from playwright.sync_api import Error

        with contextlib.suppress(Error):  # it is gone already
            if self._browser is not None:
                self._browser.close()
            self._playwright.stop()


class _Contexts:
    """A browser as BrowserGym sees it: what it makes is real, but its end is not the browser's."""

    def __init__(self, browser: Any, still: bool) -> None:
        self._browser, self._still = browser, still

    def new_context(self, **named: Any) -> Any:
        context = self._browser.new_context(**({"reduced_motion": "reduce"} if self._still else {}), **named)
        if self._still:
            context.add_init_script(
                "addEventListener('DOMContentLoaded', () => { if (window.jQuery) jQuery.fx.off = true; });"
            )
        return context

    def close(self) -> None:
        """Its contexts were closed by whoever made them."""


def load_suite(suite: str) -> list[str]:
    """The ids that ``browsergym.<suite>`` registers, without ``browsergym/``.

    Raises:
        ImportError: BrowserGym or the suite is not installed.
        UserError: the suite wants something that is not there, such as the address of its servers.
    """
    try:
        import gymnasium
        from browsergym import core  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}; run `pip install 'imagination[browsergym]'`") from error
    logging.getLogger("browsergym.core.env").setLevel(logging.ERROR)  # that our settings override a task's
    before = set(gymnasium.registry)
    try:
        importlib.import_module(f"browsergym.{suite}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"env.options.suite={suite}: {error}; run `pip install browsergym-{suite}`, or correct the name"
        ) from error
    except Exception as error:  # suites look for their servers and licences as soon as they are imported
        raise UserError(f"env.options.suite={suite} is not set up: {_first_line(error)}") from error
    marks = {f"browsergym/{suite}", f"browsergym/{suite.replace('_', '')}"}
    names = {name for name in gymnasium.registry if name.partition(".")[0] in marks} | (
        {name for name in set(gymnasium.registry) - before if name.startswith("browsergym/")}
    )
    return sorted(name.removeprefix("browsergym/") for name in names)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
