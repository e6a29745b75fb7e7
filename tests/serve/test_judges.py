"""A server that others judge: schemathesis its description, promtool its metrics, KServe's client its protocol."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import started
from serving import ask, get, quiet_server, tensors_of
from towers import trained_towers

from rowwise.recipes.export import export

pytestmark = [pytest.mark.slow, pytest.mark.dist]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """Versions that retrieve items."""
    folder = tmp_path_factory.mktemp("towers")
    export(trained_towers(folder), folder / "models")
    return folder / "models"


@pytest.mark.parametrize(("kind", "operations"), [("rows", 16), ("items", 18)])
def test_answers_are_those_that_are_described(kind, operations, request):
    models = request.getfixturevalue("towers") if kind == "items" else request.getfixturevalue("increments").models
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "tests/serve/judge.toml", "run", "--no-color"]
    with quiet_server(models) as netloc:
        command.append(f"http://{netloc}/openapi.json")
        judged = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout
    assert f"Tested: {operations}\n" in judged.stdout
    assert "No issues found" in judged.stdout


@pytest.mark.filterwarnings("ignore")  # of what the client imports
def test_the_client_of_kserve(increments):
    from httpx import HTTPStatusError
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    tensors = tensors_of(increments.rows)

    def infer_request(names, *, binary):
        inputs = [InferInput(name, list(tensors[name][1].shape), tensors[name][0]) for name in names]
        for tensor in inputs:
            tensor.set_data_from_numpy(tensors[tensor.name][1], binary_data=binary)
        outputs = [RequestedOutput("label_logit", parameters={"binary_data": binary})]
        return InferRequest("small", inputs, request_id="42", request_outputs=outputs)

    async def talk(url):
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            assert await client.is_server_live(url)
            assert await client.is_server_ready(url)
            assert await client.is_model_ready(url, "small")
            assert not await client.is_model_ready(url, "big")
            for binary in (True, False):
                answer = await client.infer(url, infer_request(tensors, binary=binary), "small")
                assert answer.id == "42"
                assert answer.outputs[0].as_numpy().tobytes() == increments.logits[4].tobytes()
            with pytest.raises(HTTPStatusError, match="no column 'd0'"):
                await client.infer(url, infer_request(["user"], binary=True), "small")

    with quiet_server(increments.models) as netloc:
        asyncio.run(talk(f"http://{netloc}"))


def promtool(*arguments, folder=None, text=None):
    """What promtool says; it says nothing of metrics that are right."""
    program = shutil.which("promtool", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    assert program, "no promtool: run tools/promtool.sh .venv/bin"
    said = subprocess.run([program, *arguments], cwd=folder, input=text, capture_output=True, check=False)
    return said.returncode, (said.stdout + said.stderr).decode()


def test_metrics_of_servers_and_runs(increments, tmp_path):
    with quiet_server(increments.models) as netloc:
        for rows in (increments.rows, {}):
            ask(netloc, "/v1/models/small/score", json.dumps({"rows": rows}).encode())
        metrics = get(netloc, "/metrics")
    assert b'code="400"' in metrics
    assert promtool("check", "metrics", text=metrics) == (0, "")
    assert promtool("check", "metrics", text=metrics.replace(b"rows_total", b"rows"))[0] != 0
    runs = increments.run.folder.path.parents[1]
    with started(tmp_path, "watch", str(runs), "--port", "0") as watch:
        address = watch.stderr.readline().partition("/ and ")[0]
        metrics = get(address.removeprefix("http://"), "/metrics")
    assert b"rowwise_train_metric{" in metrics
    assert promtool("check", "metrics", text=metrics) == (0, "")


ALERTS = {  # of run 'bad' beside run 'good': the values of a series a minute, and the labels of the alert
    "RunDied": ({'rowwise_train_state{run="bad",state="failed"}': "0 1x60"}, {"run": "bad"}),
    "RunSilent": (
        {
            'rowwise_train_state{run="bad",state="training"}': "1x60",
            'rowwise_train_line_age_seconds{run="bad"}': "0+60x60",
            'rowwise_train_state{run="good",state="training"}': "1x60",
            'rowwise_train_line_age_seconds{run="good"}': "60x60",
        },
        {"run": "bad"},
    ),
    "RunWaitsForData": (
        {
            f'rowwise_train_phase_seconds{{run="{run}",phase="{phase}"}}': f"{seconds}x60"
            for run, phases in {"bad": {"data": 4, "lookup": 6}, "good": {"data": 2, "lookup": 8}}.items()
            for phase, seconds in phases.items()
        },
        {"run": "bad"},
    ),
    "ModelDiverges": (
        {'rowwise_train_metric{run="bad",split="train",task="label",metric="ne"}': "1.1x60"},
        {"run": "bad", "split": "train", "task": "label", "metric": "ne"},
    ),
}


def test_alerts_of_the_tutorial(tmp_path):
    page = (ROOT / "docs" / "tutorials" / "watching.md").read_text()
    (tmp_path / "rules.yaml").write_text(re.search(r"```yaml\n(groups:.*?)```", page, re.S)[1])
    code, said = promtool("check", "rules", "rules.yaml", folder=tmp_path)
    assert (code, f"SUCCESS: {len(ALERTS)} rules found" in said) == (0, True), said
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in inputs.items()],
            "alert_rule_test": [{"eval_time": "60m", "alertname": name, "exp_alerts": [{"exp_labels": labels}]}],
        }
        for name, (inputs, labels) in ALERTS.items()
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    code, said = promtool("test", "rules", "tests.yaml", folder=tmp_path)
    assert code == 0, said
