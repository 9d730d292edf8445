"""A real headless Chromium for the page of `harness report`: the fixtures `browser`, `address` and `open_page`.

What asks for them is skipped where playwright or a Chromium is missing: `pip install playwright`, and a browser from
the system's packages or `playwright install chromium`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .report_records import bench, failed, memory
from .test_report import report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with api.sync_playwright() as playwright:
        found = next((path for path in map(shutil.which, NAMES) if path), None)
        try:
            chromium = playwright.chromium.launch(executable_path=found)
        except api.Error as error:
            pytest.skip(f"there is no Chromium that starts: {error.message.splitlines()[0]}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    report(folder, *bench(), failed(), *memory())
    return (folder / "page.html").as_uri()


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Open]:
    """Opens the page, or another; at the end of the test nothing was said on any console and nothing was fetched."""
    said: list[str] = []
    contexts = []

    def opened(fragment: str = "", at: str = address, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith((at, "data:")) else None)
        page.goto(at + fragment)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def count(page: Page, selector: str) -> int:
    """How many elements of a selector have a place on the page, those in closed details not counted."""
    return page.locator(selector).locator("visible=true").count()


def box(element: Locator) -> dict[str, float]:
    """Where an element is and how large, in pixels of the page."""
    found = element.bounding_box()
    assert found is not None
    return dict(found)
