"""The model of `serve.py` behind LitServe and BentoML: plain torch with the same weights, batched as they batch.

    python serve_peers.py litserve|bentoml WEIGHTS PORT WORKERS

Runs in an environment of its own, without rowwise. WEIGHTS: by torch.save, the dict that `serve.py` writes.
"""

import os
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST, WAIT_s = 64, 0.002  # requests of a batch, and what the first one waits for others


class PlainDlrm(nn.Module):
    """Tables of one id, an MLP over the numbers, dots of all vectors, an MLP over the dots."""

    def __init__(self, path: str) -> None:
        super().__init__()
        torch.set_num_threads(1)
        weights = torch.load(path)
        self.tables = [nn.EmbeddingBag.from_pretrained(rows, mode="sum") for rows in weights["tables"]]
        self.bottom, self.top = weights["bottom"], weights["top"]
        self.names, self.dense = weights["columns"], weights["dense"]
        count = len(self.tables) + 1
        self.lower = torch.tril_indices(count, count, -1)

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Logits of rows: numbers, then ids."""
        numbers, ids = x[:, : self.dense], x[:, self.dense :].long()
        bottom = _layers(numbers, self.bottom, last=True)
        vectors = [bottom, *(table(ids[:, k : k + 1]) for k, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        dots = (stacked @ stacked.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        return _layers(torch.cat([bottom, dots], 1), self.top, last=False).flatten()

    def read(self, request: dict[str, Any]) -> np.ndarray:
        """The rows of a request."""
        rows = request.get("rows")
        if rows is None:
            candidates, context = request["candidates"], request["context"]
            count = len(next(iter(candidates.values())))
            rows = candidates | {name: [value] * count for name, value in context.items()}
        return np.array([rows[name] for name in self.names], np.float64).T


def _layers(x: Tensor, layers: list[tuple[Tensor, Tensor]], *, last: bool) -> Tensor:
    for number, (weight, bias) in enumerate(layers):
        x = F.linear(x, weight, bias)
        if last or number + 1 < len(layers):
            x = x.relu_()
    return x


# Each server's processes import this file; the environment tells them which server they are.
PEER, WEIGHTS, WORKERS = (os.environ.get(name, "") for name in ("PEER", "PEER_WEIGHTS", "PEER_WORKERS"))

if PEER == "litserve":
    import litserve

    class LitDlrm(litserve.LitAPI):
        """Requests in batches."""

        def setup(self, device: str) -> None:
            self.model = PlainDlrm(WEIGHTS)

        def decode_request(self, request: dict[str, Any]) -> np.ndarray:
            return self.model.read(request)

        def batch(self, inputs: list[np.ndarray]) -> tuple[Tensor, list[int]]:
            return torch.from_numpy(np.concatenate(inputs)).float(), [len(one) for one in inputs]

        def predict(self, x: tuple[Tensor, list[int]]) -> tuple[list[float], list[int]]:
            return self.model(x[0]).tolist(), x[1]

        def unbatch(self, output: tuple[list[float], list[int]]) -> list[list[float]]:
            logits, sizes = output
            return [logits[begin:end] for begin, end in pairwise(np.cumsum([0, *sizes]).tolist())]

        def encode_response(self, output: list[float]) -> dict[str, Any]:
            return {"outputs": {"label_logit": output}}


if PEER == "bentoml":
    import bentoml

    @bentoml.service(workers=int(WORKERS), traffic={"timeout": 60}, metrics={"enabled": False})
    class BentoDlrm:
        """Requests one by one: batches of BentoML go through a second process."""

        def __init__(self) -> None:
            self.model = PlainDlrm(WEIGHTS)

        @bentoml.api
        def score(self, request: dict) -> dict:
            rows = torch.from_numpy(self.model.read(request)).float()
            return {"outputs": {"label_logit": self.model(rows).tolist()}}


def main() -> None:
    peer, weights, port, workers = sys.argv[1:]
    if not PEER:
        os.environ |= {"PEER": peer, "PEER_WEIGHTS": weights, "PEER_WORKERS": workers, "BENTOML_DO_NOT_TRACK": "1"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if peer == "bentoml":
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        options = ["--port", port, "--host", "127.0.0.1", "--api-workers", workers]
        os.execv(sys.executable, [sys.executable, "-m", "bentoml", "serve", "serve_peers:BentoDlrm", *options])
    api = LitDlrm(max_batch_size=MOST, batch_timeout=WAIT_s, api_path="/score")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(workers), fast_queue=True)
    server.run(host="127.0.0.1", port=int(port), num_api_servers=1, log_level="error", generate_client_file=False)


if __name__ == "__main__":
    main()
