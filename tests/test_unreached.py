"""Nothing is in the source that only tests use, or nobody."""

import pytest
from unreached import Module, Walk, walked

KEPT = {
    "rowwise.parallel.shard.rehearse.rehearse": "public: one step of one rank of any world, before there are machines",
    "rowwise.parallel.shard.rehearse.Rehearsal.total_bytes": "likewise",
    "rowwise.recipes.torchrec.sharding_plan": "public: TorchRec's own objects from an exported plan",
    "rowwise.tables.batch.Jagged.to_keyed": "public: TorchRec's KeyedJaggedTensor out",
    "rowwise.serve.client.ScoringClient.score_table": "public: rows of a table, which travel as Arrow",
    "rowwise.cli.notebook.Report._repr_html_": "notebooks call it",
    "rowwise.recipes.formats.mlflow_model._load_pyfunc": "MLflow calls it",
    "rowwise.recipes.formats.mlflow_model.MlflowScorer.predict": "likewise",
    "rowwise.recipes.formats.triton_model.TritonScorer": "the base of the class in an exported model.py",
    "rowwise.recipes.formats.triton_model.TritonScorer.execute": "Triton calls it",
    "rowwise.recipes.formats.triton_model.TritonScorer.initialize": "likewise",
    "rowwise.base.storage.gate._Bounded.makefile": "http.client calls it",
    "rowwise.ingest.mix.mix_bytes": "the hash of texts in numpy: the definition of its kernel",
    "rowwise.tables.store.policy.access_batch": "the row cache as pure functions: the oracle of its tests",
    "rowwise.tables.store.policy.CacheState.empty": "likewise",
}


@pytest.mark.slow
def test_everything_is_reached():
    """By a command, a public name, a benchmark or a document. Else: delete it, or move it to the tests."""
    walk = walked()
    reached = KEPT.keys() - set(map(str, walk.left()))
    assert not reached, "no longer to be kept"
    for name in KEPT:
        walk.keep(name)
    assert not sorted(map(str, walk.left()))


def test_what_only_the_unreached_use_is_unreached():
    lower = "def used(): pass\ndef dead(): pass\nclass Row:\n    def read(self): used()\n    def write(self): dead()\n"
    upper = "from lower import Row, dead\ndef main(): Row().read()\ndef unused(): dead()\nmain()\n"
    modules = {name: Module(name, text) for name, text in (("lower", lower), ("upper", upper))}
    walk = Walk(modules)
    walk.go(modules["upper"].roots)
    assert [one.name for one in walk.left()] == ["dead", "unused", "Row.write"]
    walk.keep("upper.unused")
    assert [one.name for one in walk.left()] == ["Row.write"]
