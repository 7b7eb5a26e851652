"""Dense retrieval: exact, cached, resumable, and by the encoder's own rules."""

import http.client
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

import faiss
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from megatron_drmas.environments import dense_index
from megatron_drmas.environments.corpus import CorpusError
from megatron_drmas.environments.dense_index import DenseIndex
from megatron_drmas.environments.encoder import Encoder, EncoderError, encoder_objection

WORDS = ["mayor", "founder", "seat", "of", "the", "is", "kalo", "miran", "dutu", "sefo", "query:", "passage:"]
TEXTS = [
    f"the {role} of {place} is {name}" for role in ("mayor", "founder", "seat") for place in WORDS[6:10] for name in WORDS[6:10]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random BERT with its tokenizer, as E5's folders are: no prompts of its own, mean pooling."""
    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder) -> Encoder:
    return Encoder(folder, "query: ", "passage: ")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": number, "contents": text}) + "\n" for number, text in enumerate(TEXTS)))
    return path


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "a language model (LlamaForCausalLM), not a sentence encoder"),
        ({"architectures": ["BertModel"]}, None),
        ({}, None),
        (None, "holds no encoder"),
    ],
)
def test_a_language_model_is_no_encoder(tmp_path, config, problem):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert problem is None if encoder_objection(tmp_path) is None else problem in encoder_objection(tmp_path)
    if problem:
        with pytest.raises(EncoderError, match="a sentence-transformers folder is needed"):
            Encoder(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert encoder_objection(tmp_path) is None, "a folder that says how it encodes is believed, whatever its model"


def vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Mean over a text's tokens, length 1, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()


def test_vectors_are_the_normalized_means_of_transformers(folder, encoder):
    """Whatever else is in the batch; queries and passages each with their prefix."""
    texts = [*TEXTS[:5], "kalo", "the the the of of is"]
    np.testing.assert_allclose(encoder.queries(texts), vectors(folder, [f"query: {text}" for text in texts]), atol=1e-5)
    np.testing.assert_allclose(encoder.passages(texts), vectors(folder, [f"passage: {text}" for text in texts]), atol=1e-5)


@pytest.mark.parametrize("topk", [1, 3, 100])
def test_the_nearest_passages_are_found_exactly(folder, encoder, corpus, topk):
    queries = ["mayor of kalo", "is dutu", "unknown words"]
    scores = vectors(folder, [f"query: {query}" for query in queries]) @ vectors(folder, [f"passage: {text}" for text in TEXTS]).T
    found = DenseIndex.open(corpus, encoder).search_all(queries, topk)
    for of, row in zip(found, scores, strict=True):
        assert len(of) == min(topk, len(TEXTS))
        np.testing.assert_allclose([passage.score for passage in of], np.sort(row)[::-1][: len(of)], atol=1e-5)
        assert all(passage.contents == TEXTS[int(passage.id)] for passage in of)
        np.testing.assert_allclose([row[int(passage.id)] for passage in of], [passage.score for passage in of], atol=1e-5)
    assert DenseIndex.open(corpus, encoder).search_all([], topk) == []


def test_threads_get_their_own_answers(encoder):
    """The server answers each request in a thread of its own."""
    texts = [[f"the mayor of {word}"] * (number + 1) for number, word in enumerate(WORDS)] * 4
    expected = [encoder.queries(of) for of in texts]
    with ThreadPoolExecutor(8) as pool:
        for ours, alone in zip(pool.map(encoder.queries, texts), expected, strict=True):
            np.testing.assert_allclose(ours, alone, atol=1e-6)


def test_an_interrupted_encoding_goes_on_where_it_stopped(encoder, corpus, monkeypatch):
    monkeypatch.setattr(dense_index, "PART", 7)
    encoded, passages = [], encoder.passages

    def stopping(texts):
        if len(encoded) == 3:
            raise KeyboardInterrupt
        encoded.append(texts)
        return passages(texts)

    monkeypatch.setattr(encoder, "passages", stopping)
    with pytest.raises(KeyboardInterrupt):
        DenseIndex.open(corpus, encoder)
    part = next(corpus.parent.rglob("parts/7.npy"))
    part.write_bytes(part.read_bytes()[:-10])  # it had not reached the disk
    again = []
    monkeypatch.setattr(encoder, "passages", lambda texts: again.append(texts) or passages(texts))
    resumed = DenseIndex.open(corpus, encoder).search_all(["mayor of kalo"], 5)
    assert sorted(text for texts in [encoded[0], encoded[2], *again] for text in texts) == sorted(TEXTS)
    assert not list(corpus.parent.rglob("parts"))
    monkeypatch.setattr(encoder, "passages", None)  # nothing is encoded again
    assert DenseIndex.open(corpus, encoder).search_all(["mayor of kalo"], 5) == resumed


def test_another_corpus_or_prefix_gets_an_index_of_its_own(folder, encoder, corpus):
    first = DenseIndex.open(corpus, encoder).search_all(["mayor of kalo"], 5)
    other = DenseIndex.open(corpus, Encoder(folder, "query: ", "")).search_all(["mayor of kalo"], 5)
    assert [passage.score for passage in other[0]] != [passage.score for passage in first[0]]
    corpus.write_text(json.dumps({"id": "new", "contents": "kalo"}) + "\n")
    assert [passage.id for passage in DenseIndex.open(corpus, encoder).search_all(["kalo"], 5)[0]] == ["new"]


def test_an_index_of_ones_own_is_used_if_it_fits(encoder, corpus, tmp_path):
    inner = faiss.IndexFlatIP(encoder.dimension)
    index = faiss.IndexIVFFlat(inner, encoder.dimension, 2, faiss.METRIC_INNER_PRODUCT)
    data = encoder.passages(TEXTS)
    index.train(data)
    index.add(data)
    index.nprobe = 2
    faiss.write_index(index, str(tmp_path / "mine.index"))
    exact = DenseIndex.open(corpus, encoder).search_all(["mayor of kalo"], 4)[0]
    found = DenseIndex.open(corpus, encoder, tmp_path / "mine.index").search_all(["mayor of kalo"], 4)[0]
    np.testing.assert_allclose([passage.score for passage in found], [passage.score for passage in exact], atol=1e-6)
    corpus.write_text(corpus.read_text() + json.dumps({"id": "new", "contents": "kalo"}) + "\n")
    with pytest.raises(CorpusError, match=r"mine.index holds 48 vectors of 32 numbers, but .* has 49 passages"):
        DenseIndex.open(corpus, encoder, tmp_path / "mine.index")
    (tmp_path / "mine.index").write_bytes(b"junk")
    with pytest.raises(CorpusError, match=r"mine.index cannot be read as a FAISS index"):
        DenseIndex.open(corpus, encoder, tmp_path / "mine.index")


def test_a_folder_without_an_encoder_is_named(tmp_path, folder):
    with pytest.raises(EncoderError, match="none holds no encoder"):
        Encoder(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EncoderError, match=f"{tmp_path} cannot be loaded as an encoder"):
        Encoder(tmp_path)


def test_the_server_answers_from_the_encoder(folder, encoder, corpus, repository):
    command = [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", "--corpus", corpus, "--encoder", folder]
    prefixes = ["--query-prefix", "query: ", "--passage-prefix", "passage: "]
    with subprocess.Popen([*command, *prefixes], stdout=subprocess.PIPE, text=True, cwd=repository) as server:
        try:
            connection = http.client.HTTPConnection(urlparse(server.stdout.readline().strip()).netloc, timeout=60)
            body = json.dumps({"queries": ["mayor of kalo", "is dutu"], "topk": 2, "return_scores": True})
            connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())["result"]
        finally:
            server.terminate()
    expected = DenseIndex.open(corpus, encoder).search_all(["mayor of kalo", "is dutu"], 2)
    assert [[hit["document"]["id"] for hit in of] for of in answer] == [[passage.id for passage in of] for of in expected]
