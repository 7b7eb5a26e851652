"""A retrieval server in the protocol that search agents' trainers share.

    POST /retrieve  {"query": str} or {"queries": [str, …]}, and "topk": int = 3, "return_scores": bool = false
                    -> {"result": [[passage, …] for each query]}, best first
                    passage: {"id", "contents"}, or with scores {"document": {"id", "contents"}, "score": float}
    GET  /health    -> {"status": "ok", "passages": int}

A bad request is answered 422 with the field and the limit.  Run as

    python -m megatron_drmas.environments.retrieval_server --corpus corpus.jsonl [--host 127.0.0.1] [--port 0]
        [--encoder FOLDER [--query-prefix "query: "] [--passage-prefix "passage: "] [--index FILE] [--device cuda]]

it prints its address on one line when it is ready.  Without an encoder it ranks by BM25, with one by the inner product of
the encoder's vectors.
"""

import argparse
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from megatron_drmas.environments.bm25_index import Bm25Index
from megatron_drmas.environments.corpus import MAX_TOPK, Passage, RetrievalError

MAX_QUERIES = 1024  # in one request
MAX_QUERY_CHARS = 16384

Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    query: Query | None = None
    queries: Annotated[list[Query], Field(max_length=MAX_QUERIES)] | None = None
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] = 3
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_kind_of_query(self) -> "RetrieveRequest":
        if (self.query is None) == (self.queries is None):
            raise ValueError("give either query (a string) or queries (a list of strings)")
        return self


class Index(Protocol):
    """A ranking of one corpus."""

    def __len__(self) -> int:
        """Passages of the corpus."""

    def search_all(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The best passages of each query, at most `topk`, best first."""


def build_app(index: Index) -> FastAPI:
    """The server as an ASGI application over `index`."""
    app = FastAPI(title="megatron_drmas retrieval", openapi_url=None)

    def shown(passage: Passage, with_score: bool) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if with_score else document

    # A plain function: FastAPI runs it in a thread, so that /health answers during a long batch.
    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> JSONResponse:  # plain values already: FastAPI would go through each of them
        queries = [request.query or ""] if request.queries is None else request.queries
        found = index.search_all(queries, request.topk)
        return JSONResponse({"result": [[shown(passage, request.return_scores) for passage in of] for of in found]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(index)}

    return app


def _dense_index(args: argparse.Namespace) -> Index:
    # torch and the encoder's library take seconds, which a BM25 server need not wait for.
    from megatron_drmas.environments.dense_index import DenseIndex
    from megatron_drmas.environments.encoder import Encoder

    encoder = Encoder(args.encoder, args.query_prefix, args.passage_prefix, args.device)
    return DenseIndex.open(args.corpus, encoder, args.index)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 to 65535, 0 for a free one")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """The command line: serves until it is ended, and prints its address once it answers."""
    parser = argparse.ArgumentParser(description="retrieval over a JSON-lines corpus: BM25, or dense with --encoder")
    parser.add_argument("--corpus", required=True, help='JSON lines {"id", "contents"}')
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=_port, default=0, help="0 takes a free one (default)")
    parser.add_argument("--encoder", type=Path, help="sentence-transformers folder (E5, BGE, …); default: rank by BM25")
    parser.add_argument("--query-prefix", help='before every query, "query: " for E5; default: what the encoder says')
    parser.add_argument("--passage-prefix", help='before every passage, "passage: " for E5; default: what the encoder says')
    parser.add_argument(
        "--index", type=Path, help="FAISS index of the corpus' vectors; default: made once, exact, next to the corpus"
    )
    parser.add_argument("--device", default="cpu", help="where the encoder runs (default: cpu; cuda has not been tried)")
    args = parser.parse_args(argv)
    if args.index and not args.encoder:
        parser.error("--index needs --encoder, the encoder that it was made with")
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=1024)
        index = _dense_index(args) if args.encoder else Bm25Index.open(args.corpus)
    except (RetrievalError, OSError) as error:
        print(f"retrieval server: {error}", file=sys.stderr)
        return 1
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(build_app(index), log_level="warning", access_log=False)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
