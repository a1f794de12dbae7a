"""The page of a server in a real browser: every kind of model is tried by hand, and errors are shown."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

import pinscher
from tiny_browser import chromium
from tiny_engine import TEXTS, store
from tiny_server import serving


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    store(root / "embedder", "bert", "embeddings")
    store(root / "ranker", "bert", "classification", num_labels=1)
    store(root / "judge<b>", "bert", "classification", id2label={0: "<i>bad</i>", 1: "good"}, num_labels=2)
    return root


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    names = ("embedder", "ranker", "judge<b>")
    with (
        serving(*(f"{name}={folders / name}" for name in names), "--api-key", "secret") as server,
        chromium(tmp_path_factory.mktemp("profile")) as browser,
    ):
        browser.get(server.url)
        yield browser


def tried(page, model: str, texts: list[str], query: str = "") -> list[list[str]]:
    """The rows of the table that comes."""
    Select(page.find_element(By.ID, "model")).select_by_value(model)
    for name, text in (("texts", "\n".join(texts)), ("query", query)):
        page.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, text)
    page.execute_script("document.getElementById('result').replaceChildren()")
    page.find_element(By.TAG_NAME, "button").click()
    WebDriverWait(page, 10).until(lambda _: shown(page, "result") or shown(page, "error"))
    lines = page.find_elements(By.CSS_SELECTOR, "#result tr")
    return [[cell.text for cell in line.find_elements(By.CSS_SELECTOR, "td, th")] for line in lines]


def shown(page, name: str) -> str:
    return str(page.find_element(By.ID, name).text)


def test_models_are_tried_by_hand(page, folders):
    assert tried(page, "embedder", TEXTS) == []
    assert "give the API key" in shown(page, "error")
    page.find_element(By.ID, "key").send_keys("secret")

    embeddings = pinscher.Engine(folders / "embedder").encode(TEXTS, normalize=True)
    rows = tried(page, "embedder", TEXTS)
    assert rows[0] == ["cosine similarity", *TEXTS]
    for row, text, wanted in zip(rows[1:], TEXTS, embeddings @ embeddings.T, strict=True):
        assert row[0] == text
        assert [float(cell) for cell in row[1:]] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert shown(page, "time").endswith("ms")
    assert not page.find_element(By.ID, "query").is_displayed()

    ranks = pinscher.Engine(folders / "ranker").rerank("who sat", TEXTS)
    rows = tried(page, "ranker", TEXTS, "who sat")
    assert page.find_element(By.ID, "query").is_displayed()
    assert rows[1:] == [[TEXTS[rank.index], f"{rank.score:.4f}"] for rank in ranks]

    label = pinscher.Engine(folders / "judge<b>").classify(TEXTS[0])
    rows = tried(page, "judge<b>", TEXTS[:1])
    assert rows[1] == [TEXTS[0], label.label, f"{label.score:.4f}"]
    assert {row[1] for row in rows[1:]} == {"<i>bad</i>", "good"}
    assert tried(page, "judge<b>", []) == []
    assert "give at least one" in shown(page, "error")
    odd = [one for one in page.get_log("browser") if one["level"] == "SEVERE" and "status of 4" not in one["message"]]
    assert odd == []
