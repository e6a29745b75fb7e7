"""A server that others judge: schemathesis by its description, promtool by its metrics, clients of a protocol."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import quiet_server
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
