"""A server of amounts answers in the unit of the labels, with the bits of `rowwise predict`."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from small import trained, write_rows
from test_asgi_app import Running

import rowwise
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.serve.client import ScoringClient


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["squared", "poisson"])
def test_answers_are_amounts_and_the_bits_of_predict(tmp_path, kind):
    more = {"price": lambda t: pa.array(3000.0 + 10 * t["user"].to_numpy())}
    write_rows(tmp_path / "rows.parquet", 600, **more)
    train = {"objective": {"kind": kind}, "epochs": 1, "batch": 64}
    run, _ = trained(tmp_path, columns={"labels": ["price"]}, train=train)
    data = f"parquet:{tmp_path / 'rows.parquet'}"
    export(run.folder.path, tmp_path / "models")
    predicted = []
    for path in (run.folder.path, tmp_path / "models"):
        out = tmp_path / "out.parquet"
        predict_ensemble([path], out, data=data)
        predicted.append(pq.read_table(out))
    assert predicted[0] == predicted[1]
    amounts = predicted[0]["price_amount"].to_numpy()
    assert 2000 < amounts.mean() < 4000
    rows = pq.read_table(tmp_path / "rows.parquet").slice(0, 77)
    with Running(rowwise.asgi_app(tmp_path / "models")) as url, ScoringClient(url, 60.0) as client:
        answer = client.score(rows.select(["user", "item", "seen", "d0", "d1"]).to_pydict())
        assert list(answer) == ["price_output", "price_amount"]
        np.testing.assert_array_equal(np.array(answer["price_amount"], np.float32), amounts[:77])
