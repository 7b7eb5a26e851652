"""Queries per second of the retrieval server on one core, over a corpus of short generated passages.

    python tools/bench/retrieval.py [--passages 4000] [--batch 64] [--batches 100]
"""

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlparse

SYLLABLES = ("ba", "do", "ki", "lu", "mer", "tan", "vor", "zel", "qui", "nash")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--passages", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="queries in one request")
    parser.add_argument("--batches", type=int, default=100)
    args = parser.parse_args()
    rng = random.Random(0)
    names = ["".join(rng.choices(SYLLABLES, k=4)) for _ in range(args.passages // 3)]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w") as file:
            for number in range(args.passages):
                text = f"the {rng.choice(('mayor', 'founder', 'seat'))} of {rng.choice(names)} is {rng.choice(names)} ."
                file.write(json.dumps({"id": number, "contents": text}) + "\n")
        command = [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", "--corpus", str(corpus)]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {0})) as server:
            try:
                connection = http.client.HTTPConnection(urlparse(server.stdout.readline().strip()).netloc)
                print(f"index of {args.passages} passages built and served after {time.perf_counter() - started:.2f} s")
                for batch in (args.batch, 1):
                    print(f"{queries_per_second(connection, rng, names, batch, args.batches):8.0f} queries/s in requests of {batch}")
            finally:
                server.terminate()


def queries_per_second(connection: http.client.HTTPConnection, rng: random.Random, names: list[str], batch: int, batches: int) -> float:
    started = time.perf_counter()
    for _ in range(batches):
        body = json.dumps({"queries": [f"the mayor of {rng.choice(names)}" for _ in range(batch)], "topk": 3})
        connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
        reply = json.load(connection.getresponse())
        if len(reply["result"]) != batch:
            raise RuntimeError(f"asked {batch} queries, got {len(reply['result'])} results")
    return batches * batch / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
