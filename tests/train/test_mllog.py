"""MLPerf's log has what the run's files have, is whole after a resume, and is read by MLPerf's checker."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from item_lists import sections as list_sections
from item_lists import write_lists
from small import recipe, same, saved, trained
from trainings import Killed, read_csv

from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.train.mllog import FILE, PREFIX, MlLine

LOG, EVERY = {"mllog": "dlrmv4"}, {"every": 4}
# Small rows of another data set, rates that suit them, and a model without sequences.
FINDINGS = {
    *("train_samples", "eval_samples", "max_sequence_length"),
    *("opt_base_learning_rate", "opt_sparse_base_learning_rate"),
}
NAMED = re.compile(r"CHECK for '(\w+)' failed|occurrence of '(\w+)'|Failed checks for (\w+)")


def lines_of(run):
    return MlLine.read(run.folder.path / FILE)


def untimed(lines):
    return [line._replace(time_ms=0) for line in lines]


def test_evaluations_are_those_of_the_metrics(tmp_path):
    run, result = trained(tmp_path, log=LOG, evaluate=EVERY, train={"clip": 1.0, "epochs": 1, "accumulate": 2})
    lines = lines_of(run)
    rows = [r for r in read_csv(run.folder.path / "metrics.csv") if (r["split"], r["metric"]) == ("valid", "auc")]
    scored = [(line.value, line.samples) for line in lines if line.key == "eval_accuracy"]
    assert scored == [(float(r["value"]), int(r["samples"])) for r in rows]
    assert len(scored) == 2
    values = {line.key: line.value for line in lines}
    assert (values["train_samples"], values["global_batch_size"], values["micro_batch_size"]) == (
        result.samples,
        256,
        128,
    )
    assert (values["opt_name"], values["opt_base_learning_rate"], values["opt_sparse_name"]) == (
        *("Adam", 0.01, "RowWiseAdagrad"),
    )
    times = [line.time_ms for line in lines if line.key != "init_start"]
    assert times == sorted(times)
    assert lines[-1].metadata == {"status": "success", "samples_count": result.samples}


@pytest.mark.slow
@pytest.mark.parametrize("end", [2, 9, 12])
def test_a_killed_run_leaves_the_log_and_the_bits_of_a_whole_one(tmp_path, end):
    """Before a checkpoint, after an evaluation that is repeated, and in the second epoch."""
    how = {"log": LOG, "evaluate": EVERY, "save": {"every": 6, "keep": 9}}
    whole, _ = trained(tmp_path, **how)
    plain, _ = trained(tmp_path, **how | {"log": {}})

    def kill(display):
        if display.progress.step == end:
            raise Killed

    killed = TrainingRun.start(recipe(tmp_path, **how), tmp_path / "runs", kill)
    with pytest.raises(Killed):
        killed.go()
    with (killed.folder.path / FILE).open("a") as file:
        file.write(PREFIX + '{"namespace": "", "ev')
    TrainingRun.resume(killed.folder.path).go()
    assert untimed(lines_of(killed)) == untimed(lines_of(whole))
    assert same(saved(killed.folder.path), saved(plain.folder.path))


@pytest.mark.slow
def test_a_run_without_validation_counts_its_samples(tmp_path):
    """Though nothing of its log has them: it ends within its first epoch."""
    run, result = trained(tmp_path, log=LOG, data={"valid_share": 0.0}, train={"steps": 3})
    values = {line.key: (line.value, line.samples) for line in lines_of(run)}
    assert values["train_samples"][0] == values["run_stop"][1] == result.samples == 3 * 128
    assert "eval_accuracy" not in values


@pytest.mark.slow
def test_the_accuracy_of_items_in_lists_is_the_metric_that_decides(tmp_path):
    write_lists(tmp_path / "rows.parquet")
    run = TrainingRun.start(decode(list_sections(tmp_path, log=LOG), "lists.yaml"), tmp_path / "runs")
    run.go()
    metric = run.resolved.recipe.evaluate.metric
    rows = [r for r in read_csv(run.folder.path / "metrics.csv") if (r["split"], r["metric"]) == ("valid", metric)]
    lines = lines_of(run)
    assert [line.value for line in lines if line.key == "eval_accuracy"] == [float(r["value"]) for r in rows] != []
    assert {line.key: line.value for line in lines}["max_sequence_length"] == run.resolved.recipe.model.length


@pytest.mark.slow
def test_a_finished_run_that_trains_longer_ends_once(tmp_path):
    run, _ = trained(tmp_path, log=LOG, train={"steps": 13})
    longer = TrainingRun.resume(run.folder.path, ["train.steps=null"]).go()
    lines = lines_of(run)
    ends = [line for line in lines if line.key in ("run_stop", "train_samples")]
    assert [line.key for line in ends] == ["train_samples", "run_stop"]
    assert ends[1].samples == longer.samples == 2 * ends[0].value
    assert [line.metadata["epoch_num"] for line in lines if line.key.startswith("epoch")] == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlperf_logging") is None, reason="needs the extra 'judges'")
def test_the_checker_of_mlperf_names_what_is_missing(tmp_path):
    run, _ = trained(tmp_path, log=LOG, evaluate=EVERY, train={"clip": 1.0})
    words = ("--usage", "training", "--ruleset", "6.1.0", str(run.folder.path / FILE))
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "training_6.1.0/open_dlrmv4.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert {next(filter(None, match.groups())) for match in NAMED.finditer(done.stderr)} == FINDINGS, done.stderr
