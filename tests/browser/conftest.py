"""Fixtures: one JupyterLab and one Chromium a session; a page a test."""

from __future__ import annotations

import pytest

from tests.browser.lab import CHROME_FLAGS, Page, chromium, serve


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory, nothing_is_left):
    with serve(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="session")
def notebook_server(tmp_path_factory, nothing_is_left):
    with serve(tmp_path_factory.mktemp("nb7"), app="notebook") as server:
        yield server


@pytest.fixture(scope="session")
def browser(nothing_is_left):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROME_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def lab(browser, lab_server):
    """A page of JupyterLab: `lab.open(*cells)`. Nothing it did asked another host."""
    page = Page(browser, lab_server)
    yield page
    page.close()
    assert page.elsewhere == []


@pytest.fixture
def notebook7(browser, notebook_server):
    """A page of Notebook 7."""
    page = Page(browser, notebook_server)
    yield page
    page.close()
    assert page.elsewhere == []
