"""A browser for all tests of a module, and what a page must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chromium import Chromium, find

EXECUTABLE = find()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EXECUTABLE is None:
        missing = pytest.mark.skip(reason="no Chromium found: install it or set CHROMIUM=<path>")
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(missing)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert EXECUTABLE is not None
    with Chromium(EXECUTABLE) as chromium:
        yield chromium


@pytest.fixture
def fresh(browser: Chromium) -> Iterator[Chromium]:
    """The browser as a page finds it; a test that leaves an exception or a dialog behind has failed."""
    browser.screen(1280, 900)
    browser.errors.clear()
    browser.dialogs.clear()
    browser.requests.clear()
    yield browser
    browser.run("1")  # collects events
    assert browser.errors == []
    assert browser.dialogs == []
