"""The page in a real browser: curves appear, samples open, filters work, nothing foreign loads, text stays text.

Needs playwright (pip install playwright) and Chromium: the distribution's, or playwright's own.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.view.conftest import make_run, sample, write_lines
from verl.view.command import report

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("plotly")
pytestmark = pytest.mark.browser
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("view") / "runs"
    return [make_run(root / "one"), make_run(root / "two", lr=0.01, reward=0.2)]


@contextmanager
def serving(*folders):
    """Serve runs while the block runs; yields the address."""
    program = [sys.executable, "-m", "verl", "view", *map(str, folders), "--port", "0"]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http\S+", server.stdout.readline())[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait()


@pytest.fixture(scope="module")
def address(folders):
    with serving(*folders) as address:
        yield address


@pytest.fixture
def page(browser):
    """A page of a new context, which notes what it loads and what goes wrong in it."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.loaded, page.wrong = [], []
    page.on("request", lambda request: page.loaded.append(request.url))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.wrong.append(message.text))
    yield page
    assert not page.wrong
    assert page.evaluate("window.evil") is None
    context.close()


def picture(page, name):
    if folder := os.environ.get("VERL_TEST_PICTURES"):
        page.screenshot(path=str(Path(folder) / name))


def background(page, selector):
    return page.eval_on_selector(selector, "e => getComputedStyle(e).backgroundColor")


def test_curves_of_runs_appear_and_only_the_server_is_asked(page, address):
    page.goto(address)
    page.wait_for_selector("[data-chart=Reward] .js-plotly-plot .scatterlayer .trace")
    assert page.locator("[data-chart=Reward] .scatterlayer .trace").count() == 2
    assert page.locator("[data-chart='Time per phase: one'] .barlayer .trace").count() == 2
    assert "token" not in page.url and all(url.startswith(address.partition("?")[0]) for url in page.loaded)
    assert "finished: 3 steps in 3 s." in page.inner_text("#runs") and "2 warnings" in page.inner_text("#runs")
    page.uncheck("[aria-label='show two']")
    assert page.locator("[data-chart=Reward] .scatterlayer .trace").count() == 1
    picture(page, "curves.png")
    light = background(page, "body")
    page.click("#theme")
    assert light == "rgb(255, 255, 255)" and background(page, "body") == "rgb(22, 24, 27)"
    picture(page, "dark.png")


def test_curves_grow_while_the_page_is_open(page, address, folders):
    page.goto(address)
    page.wait_for_selector("[data-chart=Entropy] .js-plotly-plot")
    assert "step 3 of 5" in page.inner_text("#runs")
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "data": {"actor/entropy": 1.0}}) + "\n")
    page.wait_for_timeout(600)  # a folder is read twice a second at most
    page.evaluate("window.page.refresh()")
    expect(page.locator("#runs")).to_contain_text("step 4 of 5")


def test_options_and_warnings_are_shown(page, address):
    page.goto(address)
    page.click("text=Options and warnings")
    page.wait_for_selector("#differences")
    text = page.inner_text("#details")
    assert "actor_rollout_ref.actor.optim.lr\t0.001\t0.01" in text and "every reward was equal" in text
    assert "secretsecret" not in text


def test_samples_are_filtered_opened_and_compared_as_text(page, address):
    page.goto(address + "#samples")
    page.click("text=Samples")
    page.wait_for_selector("#list .row")
    assert page.inner_text("#count") == "21 of 21 samples"
    page.select_option("#by-kinds", "validation")
    expect(page.locator("#count")).to_contain_text("6 of 21")
    page.select_option("#by-order", "gained")
    expect(page.locator("#count")).to_contain_text("2 of 21")
    page.select_option("#by-kinds", "training")
    page.select_option("#by-order", "worst")
    page.fill("#step", "2-3")
    page.fill("#text", "onerror")
    expect(page.locator("#count")).to_contain_text("4 of 21")
    page.click("#list .row >> nth=0")
    expect(page.locator("#sample")).to_contain_text("window.evil")
    assert page.locator("#sample img, #sample script").count() == 0  # it is read, and it is text
    assert "ground truth\n4" in page.inner_text("#sample")


def test_tokens_are_coloured_by_what_is_asked(page, address):
    page.goto(address + "#samples")
    page.click("text=Samples")
    page.wait_for_selector("#list .row")
    page.fill("#text", "ask a tool")
    expect(page.locator("#count")).to_contain_text("3 of 21")
    page.click("#list .row >> nth=0")
    page.wait_for_selector("text=turn 2, assistant")
    text = page.inner_text("#sample")
    places = [text.index(part) for part in ("look up 2 + 2", "four <script>", "it is four", "tool call lookup: ok")]
    assert places == sorted(places)
    colours = {}
    for shade in ("log_probs", "advantages", "mask", "gap"):
        page.select_option("#shade", shade)
        page.wait_for_selector(".token")
        colours[shade] = page.eval_on_selector_all(".token", "all => all.map(e => e.style.backgroundColor)")
        picture(page, f"{shade}.png")
    assert all(len(values) == 5 for values in colours.values())
    assert len(set(colours["log_probs"])) > 3 and len(set(colours["mask"])) == 2
    assert colours["mask"][2] == colours["advantages"][2] == "rgba(128, 128, 128, 0.25)"  # what was read has none


def test_a_group_is_shown_side_by_side(page, address):
    page.goto(address + "#samples")
    page.click("text=Samples")
    page.wait_for_selector("#list .row")
    page.select_option("#by-kinds", "training")
    page.fill("#text", "2 + 2?")
    expect(page.locator("#count")).to_contain_text("12 of 21")
    page.click("#list .row >> nth=0")
    page.click("#group")
    page.wait_for_selector(".member >> nth=3")
    scores = [text.split()[1] for text in page.locator(".member h3").all_inner_texts()]
    assert scores == ["1.000", "1.000", "0.000", "0.000"]
    page.select_option("#shade", "advantages")
    page.wait_for_selector(".member .token")
    picture(page, "group.png")


def test_a_report_is_the_same_page_without_a_server(page, folders, tmp_path):
    assert report([*map(str, folders), "-o", str(tmp_path / "r.html")]) == 0
    page.goto(f"file://{tmp_path}/r.html")
    page.wait_for_selector("[data-chart=Reward] .js-plotly-plot .trace")
    page.click("text=Samples")
    page.fill("#text", "onerror")
    expect(page.locator("#count")).to_contain_text("6 of 21")
    page.click("#list .row >> nth=0")
    expect(page.locator("#sample")).to_contain_text("window.evil")
    assert page.loaded == [f"file://{tmp_path}/r.html", *(url for url in page.loaded if url.startswith("data:,"))]


@pytest.mark.slow
def test_of_a_hundred_thousand_samples_few_are_drawn_and_one_is_loaded(page, folders, tmp_path):
    folder = tmp_path / "many"
    shutil.copytree(folders[0], folder)
    for step in range(1, 101):
        rows = [
            sample(step, f"s{step}-{i // 8}", f"question {i // 8}", f"an answer {i} " * 20, i % 3) for i in range(1000)
        ]
        write_lines(folder / "samples" / f"{step}.jsonl", rows)
    with serving(folder) as address:
        page.goto(address)
        page.click("text=Samples")
        expect(page.locator("#count")).to_have_text(re.compile(r"100,00\d of 100,00\d samples$"), timeout=60_000)
        for action, asked in {
            "b.filters.step = '50'; await b.filter(); b.filters.step = ''": [],
            "b.filters.order = 'best'; await b.filter()": [],
            "b.filters.order = 'gained'; await b.filter()": [],
            "b.filters.text = 'answer 777 '; await b.filter(); b.filters.text = ''": ["search"],
            "for (let k = 0; k < 50; k++) { b.list.scrollTop = k * 50000; b.drawList() }": [],
            "await b.show(b.shown[5])": ["sample"],
        }.items():
            page.loaded.clear()
            page.evaluate(f"(async () => {{ const b = window.page.browser; {action} }})()")
            routes = [re.search(r"/api/(\w+)", url) for url in page.loaded]
            assert [route[1] for route in routes if route and route[1] in ("search", "sample")] == asked, action
            assert page.locator("#list .row").count() < 80, action
