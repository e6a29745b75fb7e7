"""The application behind a server that is not ours: it follows the versions of its folder, and refuses damaged ones."""

import asyncio
import threading

import numpy as np
import pytest
import uvicorn
from launching import wait_for

import rowwise
from rowwise import CheckpointError, RowType
from rowwise.base.errors import StorageError
from rowwise.recipes.export import export
from rowwise.serve.client import ScoringClient
from rowwise.serve.package import version_folder, write_traffic
from rowwise.serve.traffic import Canary, Traffic


@pytest.fixture
def models(increments, tmp_path):
    return increments.copied(tmp_path)


class Running:
    """An application in uvicorn, in a thread."""

    def __init__(self, app):
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.server.started or not self.thread.is_alive())
        (socket,) = self.server.servers[0].sockets
        return f"http://127.0.0.1:{socket.getsockname()[1]}"

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [None, "200kB"])
def test_it_follows_its_folder(increments, models, memory):
    with Running(rowwise.asgi_app(models, memory=memory)) as url, ScoringClient(url, 60.0) as client:

        def answers(number):
            found = np.array(client.score(increments.rows)["label_logit"], np.float32)
            np.testing.assert_array_equal(found, increments.logits[number])

        answers(1)
        for number in (3, 2):
            write_traffic(models, Traffic(number))
            wait_for(lambda n=number: client.versions()["version"] == n)
            answers(number)
        (weights,) = version_folder(models, 4).path.glob("000004.*.safetensors")
        weights.unlink()
        write_traffic(models, Traffic(4))
        wait_for(lambda: "missing or damaged" in client.versions()["refused"].get("4", ""))
        wait_for(lambda: client.versions()["behind_s"] > 0)
        assert client.versions()["wanted"] == 4
        answers(2)
        (models / "current.json").write_text("{")
        write_traffic(models, Traffic(2, Canary(3, 0.5)))
        wait_for(lambda: client.versions()["canary"])
        assert b"rowwise_rows_total" in client._send("GET", "/metrics", None, "", "")


def test_one_version_stays(increments, models):
    with Running(rowwise.asgi_app(models, version=3)) as url, ScoringClient(url, 60.0) as client:
        write_traffic(models, Traffic(2))
        assert client.versions()["version"] == 3


def test_nothing_to_serve(increments, tmp_path):
    async def begin(app):
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(CheckpointError, match="version of a model"):
        asyncio.run(begin(rowwise.asgi_app(tmp_path)))
    with pytest.raises(StorageError, match="folder of this machine"):
        asyncio.run(begin(rowwise.asgi_app("s3://models/clicks")))
    export(increments.run.folder.path, tmp_path / "one", rows=RowType.INT8)
    with pytest.raises(CheckpointError, match="expected digest 00ff"):
        asyncio.run(begin(rowwise.asgi_app(tmp_path / "one", expect="00ff")))
