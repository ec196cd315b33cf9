"""The page in a real browser: Debian's Chromium, driven by Playwright, over a real server on loopback.

`TRILEMMA_BROWSER=required` (CI) makes a missing browser a failure; without it these tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from page_harness import BASE, HOSTILE
from trilemma import config, simulate
from trilemma.base.records import Record

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = os.environ.get("TRILEMMA_BROWSER") == "required"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if REQUIRED:
            raise
        pytest.skip("needs playwright: pip install playwright")
    if CHROMIUM is None:
        assert not REQUIRED, "TRILEMMA_BROWSER=required, and there is no chromium: apt-get install chromium"
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> simulate.RunDirectory:
    """A run that a test lets grow."""
    folder = tmp_path_factory.mktemp("growing") / "fresh"
    made = simulate.RunDirectory.create(folder / "grows", config.parse(BASE))
    made.seed(1).path.mkdir()
    made.seed(2).path.mkdir()
    return made


@pytest.fixture(scope="module")
def address(watched: Path, growing: simulate.RunDirectory) -> Iterator[str]:
    """The page's address, as the command prints it."""
    command = [sys.executable, "-m", "trilemma", "page", "--port", "0"]
    folders = [str(watched), str(growing.path.parent)]
    with subprocess.Popen([*command, *folders], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextmanager
def visiting(browser, **options: object) -> Iterator[object]:
    """A visitor with cookies of its own, who waits as long as a busy machine takes."""
    context = browser.new_context(**options)
    context.set_default_timeout(120_000)
    yield context
    context.close()


@pytest.fixture(scope="module")
def visitor(browser) -> Iterator[object]:
    """A browser that keeps cookies, and what it has loaded."""
    with visiting(browser, viewport={"width": 1200, "height": 900}) as context:
        yield context


@pytest.fixture
def page(visitor, address: str) -> Iterator[object]:
    """The page, opened by its address with the token, and what went wrong there."""
    opened = visitor.new_page()
    opened.problems, opened.outside = [], []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("console", lambda told: "status of 400" in told.text or opened.problems.append(told.text))
    home = address.split("/?")[0]
    opened.on("request", lambda one: opened.outside.append(one.url) if not one.url.startswith(home) else None)
    opened.goto(address)
    yield opened
    assert opened.problems == []
    assert [url for url in opened.outside if not url.startswith(("data:", "blob:"))] == []
    opened.close()


def comes_true(page, said: str) -> None:
    """Wait for what charts do a moment after their cards: they follow a card that the scroll bar narrows.

    `wait_for_function` evaluates texts in the page, which its content security policy refuses.
    """
    for _ in range(100):
        if page.evaluate(said):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"for ten seconds not: {said}")


def test_runs_are_listed_and_text_stays_text(page, address: str) -> None:
    page.wait_for_selector("table.cards tbody tr")
    assert "token" not in page.url
    names = page.locator("table.cards tbody tr td:nth-child(2) > :first-child").all_text_contents()
    assert f"runs/{HOSTILE}" in names
    assert page.title() == "Trilemma"  # the image in the name would have changed it
    assert page.locator("main img").count() == 0
    assert "cannot be read" in page.locator("tr", has_text="runs/broken").inner_text()
    page.get_by_role("searchbox").fill("study mean")
    page.wait_for_selector("table.cards tbody tr:only-child")


def test_a_run_shows_its_curves_and_whom_it_trusted(page) -> None:
    page.get_by_role("link", name="runs/study/caf").click()
    page.wait_for_selector(".map .heatmaplayer image")
    captions = " ".join(page.locator("figcaption").all_text_contents())
    for title in ("Test accuracy", "Loss", "Seconds per stage", "Attack strength"):
        assert title in captions
    assert "5 lies" in page.locator(".map").inner_text()
    comes_true(
        page,
        "[...document.querySelectorAll('figure')].every((one) => one.querySelector('.main-svg') === null"
        " || one.querySelector('.main-svg').getBoundingClientRect().right <="
        " one.getBoundingClientRect().right + 1)",
    )


def test_runs_are_compared_by_keyboard(page) -> None:
    page.wait_for_selector("table.cards tbody tr")
    for name in ("runs/study/caf", f"runs/{HOSTILE}"):
        page.get_by_label(f"choose {name}", exact=True).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare 2 runs").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=What differs")
    assert "algorithm.name" in page.locator("table").last.inner_text()
    assert page.title() == "Trilemma"


def test_a_run_that_grows_is_seen_to_grow(page, growing: simulate.RunDirectory) -> None:
    page.get_by_role("link", name="fresh/grows").click()
    page.wait_for_selector("text=0 of 6")
    for seed in (1, 2):
        for round_ in (1, 2, 3):
            record = Record(round_, metrics={"accuracy": 0.1 * round_, "loss": 1.0}, weights={0: 1.0})
            growing.seed(seed).append(record)
    page.wait_for_selector("text=3 of 6")
    page.wait_for_selector("text=30.0 ± 0.0")
    page.wait_for_selector("figure:has-text('Test accuracy') .scatterlayer .trace")


def test_the_planner_answers_and_says_why_not(page) -> None:
    page.get_by_role("link", name="Planner").click()
    page.wait_for_selector("text=guaranteed, by")
    page.wait_for_selector("figure:has-text('Noise over n') .scatterlayer .trace")
    command = page.locator("pre").first.inner_text()
    assert re.match(r"trilemma privacy -n 100 --rounds 30 -f 10 .*--epsilon 8", command)
    page.locator("input[name=byzantine]").fill("100")
    page.wait_for_selector("text=at least one client is honest: 0 ≤ f < n = 100, got f = 100")


def test_a_study_is_a_map_whose_cells_open_runs(page) -> None:
    from playwright.sync_api import expect

    page.get_by_role("link", name="Studies").click()
    page.wait_for_selector("table.heat")
    page.get_by_label("study").select_option("runs/study")
    cell = page.locator("table.heat tbody tr:nth-child(1) a")
    expect(cell).to_have_count(1)  # the study before it has more columns
    cell.click()
    page.wait_for_selector("h1:has-text('runs/study/caf')")


def test_a_federation_is_seen_from_the_server_and_from_a_client(page) -> None:
    page.get_by_role("link", name="Federation", exact=True).click()
    page.wait_for_selector("text=Run pilot")
    assert "absent" in page.locator("tr", has_text="client 2").inner_text()
    page.get_by_role("link", name="runs/federation/client-1").click()
    page.wait_for_selector("text=ε left")
    assert "Run pilot" not in page.locator("main").inner_text()


def test_charts_that_take_long_are_announced(page) -> None:
    """Of two cold loads one showed nothing below the planner for seconds."""
    page.route("**/api/plan/curves*", lambda route: (page.wait_for_timeout(1500), route.continue_()))
    page.get_by_role("link", name="Planner").click()
    page.wait_for_selector("figure:has-text('ε over rounds') >> text=Working it out")
    page.wait_for_selector("figure:has-text('ε over rounds') .scatterlayer .trace")
    assert "Working it out" not in page.locator(".grid").inner_text()


def test_a_heading_sorts_the_runs(page) -> None:
    page.wait_for_selector("table.cards tbody tr")
    page.get_by_role("button", name="score").click()
    page.wait_for_selector("th[aria-sort=ascending] >> text=score")
    scores = page.locator("table.cards tbody tr td:nth-child(7)").all_text_contents()
    told = [float(one.split()[1]) for one in scores if one.startswith("accuracy")]
    assert told == sorted(told)
    assert len(told) > 2


def test_a_phone_in_the_dark_needs_no_sideways_scrolling(browser, address: str) -> None:
    with visiting(browser, viewport={"width": 390, "height": 800}, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(address)
        for view, sign in (("runs", "table.cards"), ("planner", ".big"), ("studies", "table.heat"),
                           ("federation", "text=Run pilot")):  # fmt: skip
            page.goto(f"{address.split('?')[0]}#/{view}")
            page.wait_for_selector(sign)
            comes_true(page, "document.documentElement.scrollWidth <= 390")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"


def test_a_second_visitor_without_the_token_is_turned_away(browser, address: str) -> None:
    with visiting(browser) as context:
        page = context.new_page()
        assert page.goto(address.split("?")[0]).status == 403
        assert page.goto(f"{address.split('?')[0]}api/runs").status == 403
