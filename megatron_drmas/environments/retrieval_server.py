"""A retrieval server in the protocol that search agents' trainers share.

    POST /retrieve  {"query": str} or {"queries": [str, …]}, and "topk": int = 3, "return_scores": bool = false
                    -> {"result": [[passage, …] for each query]}, best first
                    passage: {"id", "contents"}, or with scores {"document": {"id", "contents"}, "score": float}
    GET  /health    -> {"status": "ok", "passages": int}

A bad request is answered 422 with the field and the limit.  Run as

    python -m megatron_drmas.environments.retrieval_server --corpus corpus.jsonl [--host 127.0.0.1] [--port 0]

it prints its address on one line when it is ready.
"""

import argparse
import socket
import sys
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from megatron_drmas.environments.bm25_index import Bm25Index, CorpusError, Passage

MAX_QUERIES = 1024  # in one request
MAX_TOPK = 100
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


def build_app(index: Bm25Index) -> FastAPI:
    """The server as an ASGI application over `index`."""
    app = FastAPI(title="megatron_drmas retrieval", openapi_url=None)

    def shown(passage: Passage, with_score: bool) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if with_score else document

    # A plain function: FastAPI runs it in a thread, so that /health answers during a long batch.
    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> JSONResponse:  # plain values already: FastAPI would go through each of them
        queries = [request.query] if request.queries is None else request.queries
        return JSONResponse({"result": [[shown(p, request.return_scores) for p in index.search(q, request.topk)] for q in queries]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(index)}

    return app


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use 0 to 65535, 0 for a free one")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """The command line: serves until it is ended, and prints its address once it answers."""
    parser = argparse.ArgumentParser(description="BM25 retrieval over a JSON-lines corpus")
    parser.add_argument("--corpus", required=True, help='JSON lines {"id", "contents"}')
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=_port, default=0, help="0 takes a free one (default)")
    args = parser.parse_args(argv)
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=1024)
        index = Bm25Index.open(args.corpus)
    except (CorpusError, OSError) as error:
        print(f"retrieval server: {error}", file=sys.stderr)
        return 1
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(build_app(index), log_level="warning", access_log=False)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
