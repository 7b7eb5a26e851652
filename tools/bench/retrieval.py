"""Queries per second of the retrieval server on one core, over a corpus of short generated passages, against bm25s itself.

    python -m tools.bench.retrieval [--passages 4000] [--batch 64] [--batches 100]

bm25s answers the same queries from a list of words in the same batches, on the same core, in this process: what the
server does besides is HTTP, JSON, and reading the passages from disk.  The last line is JSON: `ratio` is the server's
rate over bm25s' (target: 0.5).
"""

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlparse

import bm25s

from megatron_drmas.environments.bm25_index import split_words
from tools.ablation.command import count
from tools.bench.command import BenchParser

SYLLABLES = ("ba", "do", "ki", "lu", "mer", "tan", "vor", "zel", "qui", "nash")


TOPK, TARGET_RATIO, ROUNDS = 3, 0.5, 5


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--passages", type=count(3), default=4000)
    parser.add_argument("--batch", type=count(1), default=64, help="queries in one request")
    parser.add_argument("--batches", type=count(1), default=100)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of the server too, which inherits it
    rng = random.Random(0)
    names = ["".join(rng.choices(SYLLABLES, k=4)) for _ in range(args.passages // 3)]
    texts = [
        f"the {rng.choice(('mayor', 'founder', 'seat'))} of {rng.choice(names)} is {rng.choice(names)} ."
        for _ in range(args.passages)
    ]
    batches = [[f"the mayor of {rng.choice(names)}" for _ in range(args.batch)] for _ in range(args.batches)]
    library = bm25s.BM25()
    library.index([split_words(text) for text in texts], show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"id": n, "contents": text}) + "\n" for n, text in enumerate(texts)))
        command = [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", "--corpus", str(corpus)]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                connection = http.client.HTTPConnection(urlparse(cast(IO[str], server.stdout).readline().strip()).netloc)
                print(f"index of {args.passages} passages built and served after {time.perf_counter() - started:.2f} s")
                alone = [[query] for batch in batches for query in batch][: args.batches]
                print(f"{rate(lambda queries: served(connection, queries), alone):8.0f} queries/s in requests of one")
                ours, theirs = [], []
                for _ in range(ROUNDS):
                    ours.append(rate(lambda queries: served(connection, queries), batches))
                    theirs.append(rate(lambda queries: retrieved(library, queries, texts), batches))
            finally:
                server.terminate()
    print(f"{max(ours):8.0f} queries/s in requests of {args.batch}, bm25s {max(theirs):.0f}")
    ratio = max(ours) / max(theirs)
    print(json.dumps({"name": "retrieval", "ratio": round(ratio, 3), "target": TARGET_RATIO, "ok": ratio >= TARGET_RATIO}))
    sys.exit(ratio < TARGET_RATIO)


def rate(answer: Callable[[list[str]], list], batches: list[list[str]]) -> float:
    """Queries a second.

    Raises:
        RuntimeError: a query was not answered.
    """
    started = time.perf_counter()
    for batch in batches:
        results = answer(batch)
        if len(results) != len(batch):
            raise RuntimeError(f"asked {len(batch)} queries, got {len(results)} results")
    return sum(map(len, batches)) / (time.perf_counter() - started)


def served(connection: http.client.HTTPConnection, queries: list[str]) -> list:
    body = json.dumps({"queries": queries, "topk": TOPK})
    connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
    return json.load(connection.getresponse())["result"]


def retrieved(library: bm25s.BM25, queries: list[str], texts: list[str]) -> list:
    return list(library.retrieve([split_words(query) for query in queries], texts, k=TOPK, show_progress=False).documents)


if __name__ == "__main__":
    main()
