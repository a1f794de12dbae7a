"""The report's page in a real browser: it loads quietly, its controls work, and it shows what result.json says."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import tiny_reports
from pinscher.commands import bench as benching
from pinscher.report import bitmaps, facts, page
from tiny_browser import chromium

DESK, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Real runs; one exported and benchmarked."""
    found = tiny_reports.real_runs(tmp_path_factory.mktemp("runs"))
    benching.run(str(found[0]), ((1, 8),), ["torch", "pinscher"], 1, found[0], 0.1, lambda _: None)
    return found


@pytest.fixture(scope="module")
def pages(folders, tmp_path_factory):
    """A page of one run, of two, of nine, and of one that has hardly begun."""
    root = tmp_path_factory.mktemp("pages")
    young = root / "young"
    young.mkdir()
    shutil.copy(folders[0] / "config.yaml", young)
    many = [shutil.copytree(folders[i % 2], root / f"run-{i}") for i in range(9)]
    sets = {"one": folders[:1], "two": folders, "young": [young], "nine": many, "plain": many[1::2]}
    return {name: page.write(facts.gather(runs), root / f"{name}.html").as_uri() for name, runs in sets.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def shown(browser, pages):
    """Opens a page; afterwards nothing may stand in the console, and nothing may have been fetched."""

    def open_(name: str, size: tuple[int, int] = DESK, dark: bool = False, media: str = "screen"):
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        device = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        browser.get(pages[name])
        wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
        return browser

    yield open_
    said = [line for line in browser.get_log("browser") if line["level"] != "INFO"]
    assert said == []
    sent = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    fetched = {s["params"]["request"]["url"] for s in sent if s["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith(("file:", "data:", "blob:", "chrome:")) for url in fetched), fetched


def wait(browser, condition):
    return WebDriverWait(browser, 20).until(lambda _: condition())


def texts(browser, figure):
    return [node.text for node in browser.find_elements(By.CSS_SELECTOR, f"[data-figure={figure}]")]


def canvas(browser, place=0):
    """The pixels of a pattern, the edges left out; from when it has been drawn."""
    script = """
      const canvas = document.querySelectorAll(".pattern canvas")[arguments[0]];
      if (!canvas || canvas.width < 50) return null;
      return canvas.toDataURL();"""
    return wait(browser, lambda: browser.execute_script(script, place))


def after(browser, before, place=0):
    """The pixels of a pattern once they are others than before."""
    return wait(browser, lambda: (now := canvas(browser, place)) != before and now)


# ------------------------------------------------------------ what it says


def test_figures_are_those_of_the_result(shown, folders):
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    browser = shown("two")
    assert texts(browser, "score") == [f"{result['metrics']['pruned']['accuracy']:.2f}" for result in results]
    assert texts(browser, "dense") == [f"{results[0]['metrics']['dense']['accuracy']:.2f}", "–"]
    assert texts(browser, "sparsity") == [f"{100 * result['sparsity']:.1f} %" for result in results]
    assert texts(browser, "steps") == [str(result["steps"]) for result in results]
    browser = shown("one")
    total = facts.gather(folders[:1]).data["runs"][0]["weights"]
    assert texts(browser, "score") == [f"{results[0]['metrics']['pruned']['accuracy']:.2f}"]
    assert texts(browser, "left") == [f"{round((1 - results[0]['sparsity']) * total):,}"]
    size = (folders[0] / "export" / "model.safetensors").stat().st_size
    assert texts(browser, "size") == [f"{size / 1e6:.1f}"]
    times = json.loads((folders[0] / "bench.json").read_text())["latency"]["batch 1, 8 tokens"]
    assert texts(browser, "latency") == [f"{times['pinscher']['p50_ms']:.1f}"]
    assert f"{times['torch']['p50_ms']:.2f}" in browser.find_element(By.ID, "latency").text


def test_the_cells_are_the_analysis(shown, folders):
    browser = shown("one")
    [run] = facts.gather(folders[:1]).data["runs"]
    for measure in ("density", "rank", "dead_rows", "gini_columns"):
        Select(browser.find_element(By.ID, "measure")).select_by_value(measure)
        cells = [
            float(node.get_attribute("data-value"))
            for node in browser.find_elements(By.CSS_SELECTOR, ".heat td button")
        ]
        assert cells == pytest.approx([matrix[measure] for matrix in run["matrices"]])


def test_a_run_that_has_hardly_begun(shown):
    browser = shown("young")
    assert "running" in browser.find_element(By.ID, "title").text
    assert "There is no model yet" in browser.find_element(By.ID, "notes").text
    assert browser.find_elements(By.CSS_SELECTOR, ".pattern") == []


# ------------------------------------------------------------ controls


def test_choosing_a_matrix_changes_the_picture(shown):
    browser = shown("one")
    before = canvas(browser)
    Select(browser.find_element(By.ID, "layer")).select_by_value("0")
    layer = after(browser, before)
    Select(browser.find_element(By.ID, "kind")).select_by_value("intermediate.dense")
    after(browser, layer)
    assert (
        browser.find_element(By.CSS_SELECTOR, ".pattern canvas")
        .get_attribute("data-tensor")
        .endswith("layer.0.intermediate.dense.weight")
    )
    before = canvas(browser)
    browser.find_elements(By.CSS_SELECTOR, ".heat td button")[1].click()
    after(browser, before)
    assert browser.find_element(By.ID, "kind").get_property("value") == "key"
    before = canvas(browser)
    browser.find_element(By.ID, "sorted").click()
    after(browser, before)


def test_the_picture_is_the_mask(shown, folders):
    """Pixels of the canvas against the model's own zeros."""
    browser = shown("one")
    Select(browser.find_element(By.ID, "layer")).select_by_value("0")
    Select(browser.find_element(By.ID, "kind")).select_by_value("query")
    canvas(browser)
    read = """
      const canvas = document.querySelector(".pattern canvas"), edge = 44, pen = canvas.getContext("2d"), found = [];
      const w = canvas.width - edge, h = canvas.height - edge, [rows, columns] = arguments;
      const image = pen.getImageData(0, edge, w, h).data;
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++)
        found.push(image[4 * (Math.floor((r + 0.5) / rows * h) * w + Math.floor((c + 0.5) / columns * w))]);
      return found;"""
    found = facts.gather(folders[:1])
    matrix = found.data["runs"][0]["matrices"][0]
    mask = bitmaps.cells(found.patterns[0][0]) > 0

    def same():
        values = np.array(browser.execute_script(read, matrix["rows"], matrix["columns"]))
        return ((values < 128) == mask.ravel()).all()

    assert matrix["tensor"].endswith("layer.0.attention.self.query.weight")
    assert wait(browser, same)


def test_zoom_and_keys(shown):
    browser = shown("two")
    start = [canvas(browser, place) for place in (0, 1)]
    browser.find_element(By.ID, "zoom-in").click()
    near = [after(browser, start[place], place) for place in (0, 1)]  # both move together
    node = browser.find_element(By.CSS_SELECTOR, ".pattern canvas")
    node.send_keys(Keys.ARROW_RIGHT)
    moved = after(browser, near[0])
    node.send_keys("-")
    after(browser, moved)
    browser.find_element(By.ID, "zoom-reset").click()
    assert wait(browser, lambda: [canvas(browser, place) for place in (0, 1)] == start)


def test_hiding_a_run_hides_its_curves(shown):
    browser = shown("two")
    curves = lambda: browser.find_elements(By.CSS_SELECTOR, "#chart-objective path.curve")  # noqa: E731
    assert [node.get_attribute("data-series") for node in curves()] == ["run-0", "run-1"]
    browser.find_element(By.CSS_SELECTOR, "#runs [data-run='0']").click()
    assert [node.get_attribute("data-series") for node in curves()] == ["run-1"]
    assert (
        len(browser.find_elements(By.CSS_SELECTOR, ".pattern"))
        == len(browser.find_elements(By.CSS_SELECTOR, ".heat"))
        == 1
    )
    browser.find_element(By.CSS_SELECTOR, "#chart-objective .legend [data-run='0']").send_keys(Keys.ENTER)
    assert len(curves()) == 2
    assert browser.find_element(By.CSS_SELECTOR, "#runs [data-run='0']").get_attribute("aria-pressed") == "true"


def test_curves_can_be_read_with_the_keyboard(shown, folders):
    browser = shown("one")
    log = [json.loads(line) for line in (folders[0] / "log.jsonl").read_text().splitlines()]
    losses = [line for line in log if line["event"] == "train"]
    chart = browser.find_element(By.CSS_SELECTOR, "#chart-objective > svg")
    chart.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tip = browser.find_element(By.CSS_SELECTOR, "#chart-objective .tip").text
    assert f"step {losses[1]['step']}" in tip
    assert float(re.search(r"objective\s+([\d.]+)", tip)[1]) == pytest.approx(losses[1]["loss"], rel=1e-3)
    teachers = sum(line["event"] == "teacher" for line in log)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-score .teacher")) == teachers
    Select(browser.find_element(By.ID, "objective-curve")).select_by_value("loss_sr")
    browser.find_element(By.CSS_SELECTOR, "#chart-objective > svg").send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element(By.CSS_SELECTOR, "#chart-objective .tip").text
    assert float(re.search(r"objective\s+([\d.e-]+)", tip)[1]) == pytest.approx(losses[0]["loss_sr"], rel=0.05)


# ------------------------------------------------------------ phone, dark, paper


@pytest.mark.parametrize("name", ["one", "two", "young"])
def test_a_phone_needs_no_sideways_scrolling(shown, name):
    browser = shown(name, PHONE)
    browser.find_element(By.CSS_SELECTOR, "#settings summary").click()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    wide = """return [...document.querySelectorAll("main *")]
      .filter((one) => !one.closest(".scroll, .heat, svg") && one.getBoundingClientRect().right > innerWidth + 1)
      .map((one) => one.outerHTML.slice(0, 80))"""
    assert browser.execute_script(wide) == []


def test_a_table_has_no_empty_columns(shown):
    def heads(name):
        return [head.text for head in shown(name).find_elements(By.CSS_SELECTOR, "#result-figures thead th")]

    assert set(heads("two")) - set(heads("plain")) == {"dense", "stored", "latency"}


@pytest.mark.parametrize("dark", [False, True])
def test_nine_runs_have_nine_colours(shown, dark):
    script = "return [...document.querySelectorAll('#runs .swatch')].map((n) => getComputedStyle(n).backgroundColor)"
    found = shown("nine", dark=dark).execute_script(script)
    assert len(found) == len(set(found)) == 9


def test_many_runs_leave_a_phone_its_page(shown):
    browser = shown("nine", PHONE)
    assert browser.execute_script("return document.getElementById('bar').offsetHeight") < 100
    last = browser.find_elements(By.CSS_SELECTOR, "#runs .run")[-1]
    browser.execute_script("arguments[0].scrollIntoView()", last)  # reached by scrolling the line, not the page
    last.click()
    assert browser.find_elements(By.CSS_SELECTOR, "#runs .run")[-1].get_attribute("aria-pressed") == "false"


def luminance(colour: str) -> float:
    levels = [float(level) / 255 for level in re.findall(r"[\d.]+", colour)[:3]]
    return float(
        np.dot([0.2126, 0.7152, 0.0722], [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels])
    )


@pytest.mark.parametrize("dark", [False, True])
def test_every_cell_can_be_read(shown, dark):
    browser = shown("two", dark=dark)
    script = """return [...document.querySelectorAll(".heat td button")].map((node) => {
      const style = getComputedStyle(node);
      return [style.backgroundColor, style.color]; });"""
    cells = set()
    for measure in ("density", "rank", "gini_rows"):
        Select(browser.find_element(By.ID, "measure")).select_by_value(measure)
        cells |= {tuple(cell) for cell in browser.execute_script(script)}
    assert len(cells) > 5
    for cell in cells:
        low, high = sorted(map(luminance, cell))
        assert (high + 0.05) / (low + 0.05) >= 4.5, cell


def test_dark_mode_changes_colours(shown):
    colours = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    light = shown("one").execute_script(colours)
    pattern = canvas(shown("one"))
    browser = shown("one", dark=True)
    assert browser.execute_script(colours) != light
    lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in browser.execute_script(colours)]
    assert lightness[0] < 150 < 600 < lightness[1]
    assert canvas(browser) != pattern


def test_paper_has_everything(shown):
    browser = shown("two")
    canvas(browser)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    wait(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".heat")) == 2 * 6)  # every measure of both runs
    hidden = """const wanted = "section, .chart > svg, .pattern canvas, .heat, #settings-table tr";
      return [...document.querySelectorAll(wanted)].filter((one) => !one.getBoundingClientRect().height)
      .map((one) => one.id || one.outerHTML.slice(0, 60))"""
    assert browser.execute_script(hidden) == []
    assert not browser.find_element(By.CSS_SELECTOR, "nav").is_displayed()
    assert not browser.find_element(By.ID, "zoom-in").is_displayed()
    paper = base64.b64decode(browser.print_page())
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 3
