"""BM25 retrieval: names are found exactly, the index survives restarts and interruptions, bad input is named."""

import json
import math
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.environments import retrieval_server
from megatron_drmas.environments.bm25_index import Bm25Index, CorpusError, split_words

PASSAGES = [
    {"id": "m1", "contents": "the mayor of kalo is Vexi ."},
    {"id": "m2", "contents": "the mayor of kalor is dume ."},
    {"id": 7, "contents": "the founder of the Company is a kalo of note"},
    {"id": "u", "contents": "Ünïcode naïve Straße 北京 x"},
]


def write_corpus(path: Path, passages=PASSAGES) -> Path:
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in passages), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


@pytest.fixture
def client(corpus) -> TestClient:
    return TestClient(retrieval_server.build_app(Bm25Index.open(corpus)))


def oracle_scores(query: str, passages=PASSAGES, k1=1.5, b=0.75) -> list[float]:
    """BM25 as Lucene computes it, one document and one word at a time."""
    docs = [split_words(p["contents"]) for p in passages]
    mean_length = sum(map(len, docs)) / len(docs)
    scores = []
    for doc in docs:
        total = 0.0
        for word in split_words(query):
            containing = sum(word in other for other in docs)
            idf = math.log(1 + (len(docs) - containing + 0.5) / (containing + 0.5))
            tf = doc.count(word)
            total += idf * tf / (tf + k1 * (1 - b + b * len(doc) / mean_length))
        scores.append(total)
    return scores


@pytest.mark.parametrize("query", ["kalo", "KALO?", "who is the mayor of kalo", "mayor kalo", "straße 北京", "x"])
def test_scores_are_bm25_and_ranked_best_first(corpus, query):
    expected = oracle_scores(query)
    found = Bm25Index.open(corpus).search(query, topk=10)
    assert {p.id for p in found} == {str(PASSAGES[i]["id"]) for i, s in enumerate(expected) if s > 0}
    assert [p.score for p in found] == pytest.approx(sorted((s for s in expected if s > 0), reverse=True), rel=1e-5)


@pytest.mark.parametrize("query", ["kalor", "the mayor of kalor", "who mayors kalor", "of the is kalor a"])
def test_a_name_is_found_with_and_without_common_words_around_it(corpus, query):
    assert Bm25Index.open(corpus).search(query, topk=1)[0].id == "m2"


def test_unknown_words_find_nothing(corpus):
    assert Bm25Index.open(corpus).search("kal zzz !?", topk=3) == []
    assert Bm25Index.open(corpus).search("", topk=3) == []


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path):
    index = Bm25Index.open(write_corpus(tmp_path / "c.jsonl", [{"id": i, "contents": "same words"} for i in range(50)]))
    assert [p.id for p in index.search("words", topk=7)] == [str(i) for i in range(7)]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.text(alphabet="ab c.é", max_size=12), min_size=1, max_size=30),
    st.text(alphabet="ab cé", max_size=6),
    st.integers(1, 5),
)
def test_topk_is_a_prefix_of_the_full_ranking(tmp_path_factory, texts, query, topk):
    path = write_corpus(tmp_path_factory.mktemp("c") / "c.jsonl", [{"id": i, "contents": t + " w"} for i, t in enumerate(texts)])
    index = Bm25Index.open(path)
    full = index.search(query + " w", topk=len(texts))
    assert len(full) == len(texts)
    assert index.search(query + " w", topk=topk) == full[:topk]


def test_the_cached_index_answers_like_the_fresh_one(corpus):
    fresh = Bm25Index.open(corpus).search("mayor of kalo", 4)
    folders = sorted(p.name for p in Path(f"{corpus}.bm25").iterdir())
    assert Bm25Index.open(corpus).search("mayor of kalo", 4) == fresh
    assert sorted(p.name for p in Path(f"{corpus}.bm25").iterdir()) == folders and len(folders) == 1


def test_an_edited_corpus_gets_a_new_index(corpus):
    Bm25Index.open(corpus)
    write_corpus(corpus, PASSAGES[1:])
    assert [p.id for p in Bm25Index.open(corpus).search("kalo", 5)] == ["7"]


def test_an_interrupted_build_leaves_nothing_that_is_used(corpus, monkeypatch):
    monkeypatch.setattr("numpy.save", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Bm25Index.open(corpus)
    monkeypatch.undo()
    assert list(Path(f"{corpus}.bm25").iterdir()) == []
    assert Bm25Index.open(corpus).search("kalor", 1)[0].id == "m2"


@pytest.mark.parametrize(
    "line, says",
    [
        ("{oops", "not JSON"),
        ('["a"]', "got list"),
        ('{"id": "a"}', "no 'contents'"),
        ('{"contents": "a"}', "no 'id'"),
        ('{"id": 1, "contents": 3}', "'contents' of type int"),
        ('{"id": "m1", "contents": "again"}', "'m1' was used on line 1"),
    ],
)
def test_a_malformed_line_is_named(corpus, line, says):
    corpus.write_text(corpus.read_text() + "\n" + line + "\n")
    with pytest.raises(CorpusError) as error:
        Bm25Index.open(corpus)
    assert f"{corpus}:{len(PASSAGES) + 2}:" in str(error.value) and says in str(error.value)


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="at least one"):
        Bm25Index.open(write_corpus(tmp_path / "c.jsonl", []))


def test_one_query_and_a_batch_of_queries_agree(client):
    batch = client.post("/retrieve", json={"queries": ["kalo", "dume", "zzz"], "topk": 2, "return_scores": True}).json()["result"]
    singles = [
        client.post("/retrieve", json={"query": q, "topk": 2, "return_scores": True}).json()["result"]
        for q in ("kalo", "dume", "zzz")
    ]
    assert batch == [s[0] for s in singles] and [len(r) for r in batch] == [2, 1, 0]
    bare = client.post("/retrieve", json={"queries": ["kalo", "dume", "zzz"], "topk": 2}).json()["result"]
    assert bare == [[item["document"] for item in items] for items in batch]
    assert bare[1] == [{"id": "m2", "contents": PASSAGES[1]["contents"]}]


@pytest.mark.parametrize(
    "body, field",
    [
        ({}, "query"),
        ({"query": "a", "queries": ["b"]}, "query"),
        ({"query": "a", "topk": 0}, "topk"),
        ({"query": "a", "topk": retrieval_server.MAX_TOPK + 1}, "topk"),
        ({"query": "a" * (retrieval_server.MAX_QUERY_CHARS + 1)}, "query"),
        ({"queries": ["a"] * (retrieval_server.MAX_QUERIES + 1)}, "queries"),
        ({"queries": "a"}, "queries"),
        ({"queries": [None]}, "queries"),
    ],
)
def test_a_bad_request_is_answered_with_the_field(client, body, field):
    reply = client.post("/retrieve", json=body)
    assert reply.status_code == 422 and field in reply.text
    assert client.get("/health").json() == {"status": "ok", "passages": len(PASSAGES)}


def test_the_command_prints_an_address_that_answers(corpus):
    command = [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", "--corpus", str(corpus)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            request = urllib.request.Request(
                f"{address}/retrieve", json.dumps({"query": "dume"}).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=20) as reply:
                assert json.load(reply)["result"][0][0]["id"] == "m2"
            modules = subprocess.run(
                [sys.executable, "-c", "import sys, megatron_drmas.environments.retrieval_server; print('torch' in sys.modules)"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert modules.stdout.strip() == "False"
        finally:
            server.terminate()


@pytest.mark.parametrize("text", ["", '{"id": 1}\n'])
def test_the_command_says_in_one_line_why_it_cannot_serve(tmp_path, text):
    (tmp_path / "c.jsonl").write_text(text)
    command = [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", "--corpus", str(tmp_path / "c.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "c.jsonl" in done.stderr
