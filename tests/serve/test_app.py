"""The routes, asked by the clients that people use: openai's own, and Hugging Face's for text-embeddings-inference."""

from __future__ import annotations

import base64
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

import pinscher
from tiny_engine import TEXTS, store, write_sentences
from tiny_server import serving


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    embedder = store(root / "embedder", "bert", "embeddings")
    write_sentences(embedder, "Normalize", prompts={"query": "who is "})
    store(root / "ranker", "bert", "classification", num_labels=1)
    store(root / "judge", "distilbert", "classification", id2label={0: "bad", 1: "good"}, num_labels=2)
    return root


@pytest.fixture(scope="module")
def server(folders):
    words = [f"{name}={folders / name}" for name in ("embedder", "ranker", "judge")]
    with serving(*words, "--max-texts", "100", "--max-megabytes", "1") as running:
        yield running


@pytest.fixture(scope="module")
def embedder(folders):
    return pinscher.Engine(folders / "embedder")


# ------------------------------------------------------------ clients


def test_openais_client(server, embedder):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    wanted = embedder.encode(TEXTS)
    for encoding in ("float", "base64", openai.NOT_GIVEN):
        answer = client.embeddings.create(model="embedder", input=TEXTS, encoding_format=encoding)
        rows = [
            np.frombuffer(base64.b64decode(one.embedding), "<f4") if isinstance(one.embedding, str) else one.embedding
            for one in answer.data
        ]
        assert np.array_equal(np.array(rows, np.float32), wanted)
        assert [one.index for one in answer.data] == [0, 1, 2]
    ids = embedder.tokenizer(TEXTS).ids
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert answer.model == "embedder"
    one = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=5).data[0].embedding
    assert np.array_equal(np.array(one, np.float32), embedder.encode(TEXTS[0], dimensions=5))
    for given in (ids, ids[0]):
        rows = [one.embedding for one in client.embeddings.create(model="embedder", input=given).data]
        assert np.array_equal(np.array(rows, np.float32), wanted[: len(rows)])
    assert [model.id for model in client.models.list()] == ["embedder", "ranker", "judge"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'nobody'"):
        client.embeddings.create(model="nobody", input="a film")
    with pytest.raises(openai.UnprocessableEntityError, match="ranker is for classification"):
        client.embeddings.create(model="ranker", input="a film")
    with pytest.raises(openai.APIStatusError, match="more than the 70 tokens") as seen:
        client.embeddings.create(model="embedder", input="film " * 100)
    assert seen.value.status_code == 413
    cut = client.embeddings.create(model="embedder", input="film " * 100, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 70


def test_hugging_faces_client(server, folders, embedder):
    found = InferenceClient(f"{server.url}/embed").feature_extraction(TEXTS[0])
    assert np.array_equal(found[0], embedder.encode(TEXTS[0]))
    found = InferenceClient(f"{server.url}/embed").feature_extraction(
        TEXTS[0], normalize=False, prompt_name="query", truncate=True
    )
    assert np.array_equal(found[0], embedder.encode(TEXTS[0], normalize=False, prompt_name="query"))


def test_texts_are_classified(server, folders):
    judge = pinscher.Engine(folders / "judge")

    def shaped(label):
        pairs = sorted(label.scores.items(), key=lambda pair: -pair[1])
        return [{"label": name, "score": score} for name, score in pairs]

    wanted = [shaped(label) for label in judge.classify(TEXTS)]
    told = {"model": "judge"}
    assert server.ask("/predict", {"inputs": TEXTS[0], **told}) == (200, wanted[0])
    assert server.ask("/predict", {"inputs": [[text] for text in TEXTS], **told}) == (200, wanted)
    pair = shaped(judge.classify((TEXTS[0], TEXTS[1])))
    assert server.ask("/predict", {"inputs": TEXTS[:2], **told}) == (200, pair)
    assert server.ask("/predict", {"inputs": [TEXTS[:2]], **told}) == (200, [pair])
    status, raw = server.ask("/predict", {"inputs": TEXTS[0], "raw_scores": True, **told})
    assert status == 200
    assert sorted(one["score"] for one in raw) == sorted(map(float, judge.logits(TEXTS[:1])[0]))


def test_texts_are_ranked(server, folders):
    ranker = pinscher.Engine(folders / "ranker")
    asked = {"query": "who sat", "texts": TEXTS}
    for raw in (False, True):
        wanted = [{"index": rank.index, "score": rank.score} for rank in ranker.rerank("who sat", TEXTS, raw=raw)]
        assert server.ask("/rerank", {**asked, "raw_scores": raw}) == (200, wanted)
    status, found = server.ask("/rerank", {**asked, "return_text": True})
    assert status == 200
    assert [TEXTS[one["index"]] for one in found] == [one["text"] for one in found]


# ------------------------------------------------------------ facts


def test_what_the_server_tells(server):
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.ask("/info")[1]["model_id"] == "embedder"
    status, told = server.ask("/openapi.json")
    assert status == 200
    assert {"/v1/embeddings", "/embed", "/rerank", "/predict", "/v1/models", "/metrics"} <= set(told["paths"])
    assert server.ask("/docs")[0] == 200


def test_metrics_count(server):
    def numbers():
        lines = [line for line in server.ask("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = numbers()
    server.ask("/embed", {"inputs": TEXTS})
    server.ask("/embed", {"inputs": 5})
    after = numbers()
    for name, more in (
        ('pinscher_requests_total{route="/embed",status="200"}', 1),
        ('pinscher_requests_total{route="/embed",status="422"}', 1),
        ('pinscher_request_seconds_count{route="/embed"}', 2),
        ('pinscher_request_seconds_bucket{route="/embed",le="+Inf"}', 2),
        ("pinscher_texts_total", 3),
    ):
        assert after[name] - before.get(name, 0) == more, name
    assert after["pinscher_queue_texts"] == 0


# ------------------------------------------------------------ what is refused

LONG = "film " * 100
REFUSED = [
    ("/embed", b"{", 422, "the body is not JSON"),
    ("/embed", b"5", 422, "send one, with the header content-type"),
    ("/embed", b"\xff\xfe", 422, ""),
    ("/embed", {"inputs": []}, 422, "give at least one"),
    ("/embed", {}, 422, "inputs"),
    ("/embed", {"inputs": [5]}, 422, "inputs"),
    ("/embed", {"inputs": "a", "normalize": "maybe"}, 422, "normalize"),
    ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "the model's prompts: query"),
    ("/embed", {"inputs": "a", "dimensions": 49}, 422, "the model has 48"),
    ("/embed", {"inputs": ["a"] * 101}, 413, "101 texts in a request: at most 100"),
    ("/embed", {"inputs": LONG}, 413, "more than the 70 tokens"),
    ("/embed", {"inputs": "a", "model": "judge"}, 422, "judge is for classification, not for embeddings"),
    ("/embed", {"inputs": "a", "model": "nobody"}, 404, "there is no model 'nobody'"),
    ("/embed", b'{"inputs": "\\ud800"}', 422, ""),
    ("/embed", b"[" * 100_000, 400, "parsing the body"),
    ("/embed", b'{"inputs": "' + b"a" * (1 << 20) + b'"}', 413, "the body is too large"),
    ("/rerank", {"query": "a", "texts": []}, 422, "give at least one"),
    ("/rerank", {"query": "a", "texts": ["b"], "model": "judge"}, 422, "judge has 2 labels"),
    ("/predict", {"inputs": ["a", "b", "c"], "model": "judge"}, 422, "a pair of texts"),
    ("/predict", {"inputs": [], "model": "judge"}, 422, "give at least one"),
    ("/predict", {"inputs": [[]], "model": "judge"}, 422, "a pair of texts"),
    ("/v1/embeddings", {"input": [[1, 99]]}, 422, "input_ids contain 99"),
    ("/v1/embeddings", {"input": [[]]}, 413, "row 0 has 0 tokens"),
    ("/v1/embeddings", {"input": [[10**30]]}, 422, ""),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 422, "encoding_format"),
    ("/nothing", {"inputs": "a"}, 404, ""),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_wrong_requests(server, path, body, status, message):
    body = {**body, "model": body.get("model", "embedder")} if path == "/v1/embeddings" else body
    found, told = server.ask(path, body)
    assert found == status, told
    if path != "/nothing":
        text = told["error"]["message"] if path.startswith("/v1/") else told["error"]
        assert message in text
        assert "Traceback" not in text
    assert server.ask("/health")[0] == 200


def test_unicode(server, embedder):
    texts = ["", "   ", "żółć 漢字 🐕", "a\x00b", "\u202e\u200d", "film é " * 60]
    status, found = server.ask("/embed", {"inputs": texts, "truncate": True})
    assert status == 200
    with pytest.warns(UserWarning, match="cut off"):
        assert np.array_equal(np.array(found, np.float32), embedder.encode(texts))


# ------------------------------------------------------------ many clients, keys, ends


def test_many_clients_get_what_they_asked_for(server, embedder):
    texts = [" ".join(TEXTS[number % 3].split()[: 1 + number % 11]) for number in range(120)]
    wanted = embedder.encode(texts)

    def ask(number):
        status, found = server.ask("/embed", {"inputs": texts[number]})
        return status == 200 and np.array_equal(np.array(found[0], np.float32), wanted[number])

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, range(120)))


def test_a_key(folders):
    with serving(str(folders / "embedder"), PINSCHER_API_KEY="secret") as running:
        assert running.ask("/health")[0] == 200
        assert running.ask("/embed", {"inputs": "a"})[0] == 401
        assert running.ask("/embed", {"inputs": "a"}, authorization="Bearer secrets")[0] == 401
        assert running.ask("/v1/models")[1]["error"]["type"] == "invalid_request_error"
        assert running.ask("/embed", {"inputs": "a"}, authorization="Bearer secret")[0] == 200
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret")
        assert len(client.embeddings.create(model="any", input="a").data) == 1


def test_an_end_waits_for_requests_under_way(folders):
    with serving(str(folders / "embedder")) as running:
        texts = [" ".join(TEXTS) * 2] * 1000
        found = []
        asking = threading.Thread(target=lambda: found.append(running.ask("/embed", {"inputs": texts})))
        asking.start()
        while not found and "pinscher_batches_total 0\n" in running.ask("/metrics")[1]:
            time.sleep(0.01)
        code = running.stop(signal.SIGTERM)
        asking.join(30)
        assert found[0][0] == 200
        assert len(found[0][1]) == 1000
        assert code in (0, -signal.SIGTERM)


def test_several_processes(folders):
    with serving(f"x={folders / 'embedder'}", "--workers", "2") as running:
        for _ in range(60):
            try:
                status, _ = running.ask("/embed", {"inputs": "a film"})
            except OSError:  # none is ready yet
                time.sleep(0.5)
                continue
            assert status == 200
            break
        assert json.dumps(running.ask("/v1/models")[1]["data"][0]["id"]) == '"x"'
        running.stop()
