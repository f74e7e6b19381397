"""The HTML page in a browser: charts, selections, sorting, both themes, and nothing from a store runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_runs import fake_run, sweep
from test_html import HOSTILE, content, examined

from glocal.report.html.page import write_report
from glocal.store.run import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OFFLINE = ("background-networking", "component-update", "sync", "gpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: .ci/browser installs it"),
]


class Opened(NamedTuple):
    """A page that is open, and what it said and asked for."""

    page: Any
    said: list[str]
    requests: list[str]


def named(runs: list[Run], store: str) -> list[Run]:
    return [replace(run, path=Path(store) / "runs" / f"{i:016x}") for i, run in enumerate(runs)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in OFFLINE)]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one store with two challenges, and one that compares two stores with hostile names."""
    folder = tmp_path_factory.mktemp("pages")
    lost = lambda name, lr, seed: 0.1 + lr * (name == "ewc") + 0.01 * seed  # noqa: E731
    runs = sweep(["er", "sgd", "ewc"], [0.01, 0.1], [0, 1], lost)
    runs += sweep(["er"], [0.1], [0, 1], lost, challenge="split-digits", setting="class", epochs=4)
    runs += [fake_run("er", 0.5, 0, diverged=3), fake_run("er", 0.5, 0, challenge="third", diverged=3)]
    hostile = [
        fake_run(HOSTILE, seed=seed, challenge=HOSTILE, label=HOSTILE, options={HOSTILE: value}, lost=0.1 * seed)
        for seed in (0, 1)
        for value in (HOSTILE, "b")
    ]
    stores = [content(named(hostile, name), name + HOSTILE) for name in "ab"]
    return {
        "one": write_report([content(named(runs, "runs"))], folder / "one.html"),
        "two": write_report(stores, folder / "two.html", [examined()]),
    }


def open_page(browser: Any, path: Path, theme: str = "light") -> Opened:
    page, said, requests = browser.new_page(color_scheme=theme), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    return Opened(page, said, requests)


@pytest.fixture(scope="module")
def opened(browser: Any, files: dict[str, Path]) -> Opened:
    return open_page(browser, files["one"])


@pytest.fixture(autouse=True)
def reset(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "opened" in request.fixturenames:
        page = request.getfixturevalue("opened").page
        if page.locator("#clear").is_visible():
            page.click("#clear")
        page.select_option("#challenge", "0")


def marks(page: Any, chart: str) -> list[float]:
    """The opacities of the points of a chart."""
    found: list[float] = page.evaluate(
        "id => [...document.querySelectorAll(`#${id} .mark-symbol path`)].map(p => +(p.getAttribute('opacity') ?? 1))",
        chart,
    )
    return found


def test_every_chart_has_marks_without_an_error_or_a_request(opened: Opened, files: dict[str, Path]) -> None:
    for chart in ("over-forgetting", "over-metric", "over-distance", "tradeoff"):
        assert len(marks(opened.page, chart)) == 6 + 12, chart  # groups and seeds that did not diverge
    assert len(marks(opened.page, "tasks")) == 3 * 3 and len(marks(opened.page, "loss")) == 3 * 3 * 2
    assert opened.page.locator("#matrix .mark-rect.role-mark path").count() == 4 * 3
    assert opened.said == [] and opened.requests == [files["one"].as_uri()]
    assert files["one"].stat().st_size < 1.5e6


def test_a_choice_in_legend_chart_or_table_is_one_everywhere(opened: Opened) -> None:
    page = opened.page
    chip, said = page.locator("#families button", has_text="ewc"), page.locator("#said")
    charts = ("over-forgetting", "tradeoff", "tasks", "loss")

    def highlighted() -> list[int]:
        page.wait_for_timeout(100)
        return [sum(x > 0.1 for x in marks(page, chart)) for chart in charts]

    everything, ewc = highlighted(), [2 + 4, 2 + 4, 3, 6]
    chip.focus()
    page.keyboard.press("Enter")
    assert chip.get_attribute("aria-pressed") == "true" and "ewc" in said.inner_text()
    assert highlighted() == ewc
    assert page.locator("#result-table tbody tr:not(.dim)").count() == 2
    assert page.locator("#run-name option").count() == 4  # the matrices of the chosen runs
    page.click("#clear")
    assert highlighted() == everything
    page.locator("#result-table .pick", has_text="ewc").first.click()
    assert highlighted() == ewc
    page.click("#clear")
    page.locator("#over-metric .mark-symbol path").nth(0).dispatch_event("click")
    assert page.locator("#families button[aria-pressed=true]").count() == 1
    page.click("#clear")
    page.fill("#filter", "ewc 0.01")
    assert highlighted()[0] == 1 + 1 + 2  # both means of the series, of which one is chosen, and its seeds
    assert page.locator("#result-table tbody tr:visible").count() == 1


def test_columns_are_sorted(opened: Opened) -> None:
    page = opened.page
    header = page.locator("#result-table th", has_text="FGT").first
    column = header.evaluate("th => th.cellIndex")
    for order in ("ascending", "descending"):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == order
        texts = page.locator(f"#result-table tbody tr td:nth-child({column + 1})").all_inner_texts()
        values = [float(text.split()[0].replace("−", "-")) for text in texts if text != "diverged" and text != "–"]
        assert len(values) >= 6 and values == sorted(values, reverse=order == "descending")
        assert texts[-1] in ("–", "diverged")
    assert page.locator("#result-table [aria-sort=ascending]").count() == 0


def test_options_runs_and_challenges_are_chosen(opened: Opened) -> None:
    page = opened.page
    before = page.locator("#matrix-about").inner_text()
    page.locator("#run").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#matrix-about").inner_text() != before
    assert page.locator("#run-name").input_value() == page.evaluate(
        "String(document.getElementById('run-name').selectedIndex)"
    )
    page.select_option("#rates", "all")
    page.wait_for_timeout(200)
    assert len(marks(page, "tasks")) == 3 * 6
    page.select_option("#option", label="epochs")
    page.wait_for_timeout(300)
    assert page.locator("#over-metric svg.marks").text_content().count("epochs") == 1
    page.select_option("#challenge", label="third")
    page.wait_for_timeout(200)
    assert "Nothing to draw" in page.locator("#over-metric").inner_text()
    page.select_option("#challenge", label="split-digits")
    page.select_option("#option", label="learning rate")
    page.wait_for_timeout(300)
    assert len(marks(page, "over-metric")) == 1 + 2
    assert opened.said == []


def test_dark_and_light(browser: Any, files: dict[str, Path]) -> None:
    page, said, _ = open_page(browser, files["one"], "dark")
    line = "document.querySelector('#tasks .mark-line path').getAttribute('stroke')"
    look = f"() => [getComputedStyle(document.body).backgroundColor, {line}]"
    dark = page.evaluate(look)
    page.click("#theme")
    page.wait_for_timeout(300)
    light = page.evaluate(look)
    assert sum(map(int, dark[0][4:-1].split(","))) < 150 < 600 < sum(map(int, light[0][4:-1].split(",")))
    assert dark[1] != light[1]
    page.set_viewport_size({"width": 360, "height": 640})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360 and said == []
    page.close()


def test_hostile_names_are_text(browser: Any, files: dict[str, Path]) -> None:
    page, said, requests = open_page(browser, files["two"])
    page.select_option("#option", "1")
    page.locator("#over-metric .mark-symbol path").last.hover()
    assert "0000000" in page.locator("#vg-tooltip-element").inner_text()
    page.locator("#families button").first.click()
    page.fill("#filter", HOSTILE)
    page.wait_for_timeout(300)
    assert page.title() == f"glocal report: a{HOSTILE} and b{HOSTILE}"
    assert page.locator("img").count() == 0 and page.locator("script").count() == 3
    assert HOSTILE[:30] in page.locator("#families button").first.inner_text()
    assert (
        len(marks(page, "change-forgetting")) == 2
        and "Differences" in page.locator("#change-table caption").inner_text()
    )
    assert [len(marks(page, f"{chart}-0")) for chart in ("region", "predicted", "spectrum")] == [1, 1, 4]
    assert said == [] and len(requests) == 1
    page.close()


def test_names_roles_and_headings(opened: Opened) -> None:
    """Every control and every chart has a name that screen readers tell, and there are landmarks."""
    page = opened.page
    for role in ("banner", "main", "navigation", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    unnamed = """() => [...document.querySelectorAll('button, select, input, [role=region], .marks')].filter(e =>
        !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label') || e.closest('details'))).length"""
    assert page.evaluate(unnamed) == 0
    assert page.locator("[role=graphics-document][aria-label]").count() == 7
