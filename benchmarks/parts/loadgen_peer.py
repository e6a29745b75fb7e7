"""The model of `loadgen.py` in plain torch, behind uvicorn and Starlette: one request after the other.

    python loadgen_peer.py WEIGHTS PORT WORKERS

WEIGHTS: by torch.save, the dict of `write_weights`. The JSON of a request, and of its answer, is that of
`rowwise serve`.
"""

import os
import sys
from pathlib import Path

import torch
import uvicorn
from serve_peers import PlainDlrm
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

NAME = "LOADGEN_WEIGHTS"  # tells the workers, which import this file


def make_app() -> Starlette:
    model = PlainDlrm(os.environ[NAME])

    async def score(request: Request) -> JSONResponse:
        rows = torch.from_numpy(model.read(await request.json())).float()
        logits = model(rows)
        return JSONResponse(
            {"outputs": {"label_logit": logits.tolist(), "label_probability": logits.sigmoid().tolist()}}
        )

    return Starlette(routes=[Route("/score", score, methods=["POST"])])


def main() -> None:
    weights, port, workers = sys.argv[1:]
    os.environ[NAME] = weights
    os.chdir(Path(__file__).parent)
    uvicorn.run(
        "loadgen_peer:make_app", factory=True, port=int(port), workers=int(workers), log_level="error", access_log=False
    )


if __name__ == "__main__":
    main()
