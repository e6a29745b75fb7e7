"""`rowwise.torchrec`: models that were written with TorchRec train here as they do there, and go back."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torchrec_door_work as work
from torchrec_door_work import OPTIMIZERS, OTHERS, PACKAGED

from rowwise.parallel.comm.spawn import run_processes

TORCHREC = pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")
SCRIPT = Path(work.__file__)


@pytest.mark.slow
def test_nothing_else_loads_it():
    """Of the files that a plain import, the trainer and the command line are made of."""
    names = ("torchrec", "fbgemm", "rowwise.torchrec", "rowwise.recipes.door")
    code = "import sys, rowwise, rowwise.recipes.runs, rowwise.cli.train\n"
    code += f"print([name for name in sys.modules if name.startswith({names})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_without_torchrec_one_line_says_so():
    code = "import sys; sys.modules['torchrec'] = None\nfrom rowwise.torchrec import DistributedModelParallel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].startswith("rowwise.base.errors.SpecError: TorchRec cannot be imported")


@pytest.mark.slow
@TORCHREC
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_trains_as_torchrec(optimizer):
    (found,) = run_processes(1, work.against_torchrec, optimizer, PACKAGED + OTHERS)
    assert found.keys() == {*PACKAGED, *OTHERS}
    check_differences(found)


def check_differences(found):
    """Of losses, of state dicts, and of outputs with the weights back in TorchRec."""
    for losses, state, outputs in found.values():
        assert losses < 1e-5
        assert state < 1e-5
        assert outputs < 1e-5


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layouts", [(), ("table_wise",), ("column_wise", "row_wise")], ids=str)
def test_two_ranks_train_as_torchrec(optimizer, layouts):
    """By our plan, and by plans of TorchRec's. With all tables cut by rows it would divide sums beside means, too."""
    for found in run_processes(2, work.against_torchrec, optimizer, PACKAGED + OTHERS, layouts):
        check_differences(found)


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
@pytest.mark.parametrize("ranks", [1, 2])
def test_adam_is_that_of_the_paper(ranks):
    """FBGEMM has none for CPUs."""
    for found in run_processes(ranks, work.against_adam, PACKAGED + OTHERS):
        for losses, averages in found.values():
            assert losses < 1e-5
            assert averages >= 3


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pipeline", ["TrainPipelineBase", "TrainPipelineSparseDist"])
def test_pipelines_train_as_a_loop(ranks, pipeline):
    for found in run_processes(ranks, work.pipelined, pipeline, True):
        for looped, piped, state, _ in found.values():
            assert looped == piped
            assert state == 0.0


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
def test_a_pipeline_that_leaves_batches_leaves_no_collective():
    """Many models after each other, each with batches on their way."""
    for found in run_processes(2, work.pipelined, "TrainPipelineSparseDist", False):
        for looped, piped, _, ahead in found.values():
            assert piped == looped[:6]
            assert ahead >= 1


@pytest.mark.slow
@TORCHREC
def test_learning_rates_follow_a_schedule():
    (difference,) = run_processes(1, work.scheduled)
    assert difference < 1e-5


@pytest.mark.slow
@TORCHREC
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "Adam"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, optimizer):
    ends = {}
    for name, runs in {"whole": (0,), "killed": (7, 0)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for die_at in runs:
            command = [sys.executable, SCRIPT, folder, optimizer, "10", str(die_at)]
            code = subprocess.run(command, timeout=120, check=False).returncode
            assert code == (-9 if die_at else 0)
        ends[name] = torch.load(folder / "end.pt")
    torch.testing.assert_close(ends["killed"], ends["whole"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
def test_checkpoints_of_torch_fit_other_plans(tmp_path):
    for outputs, losses in run_processes(2, work.saved_by_dcp, str(tmp_path)):
        assert outputs < 1e-5
        assert losses == 0.0


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
def test_rows_on_the_meta_device_are_drawn_by_their_config():
    (first, agree), (second, _) = run_processes(2, work.on_the_meta_device)
    assert agree
    assert all(0.5 < max(a, b) <= 1.0001 for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
def test_sharders_have_optimizers_and_wires():
    for exact, narrow, ratio in run_processes(2, work.by_sharders):
        assert exact < 1e-5
        assert narrow < 1e-3
        assert ratio == 2


@pytest.mark.slow
@TORCHREC
def test_kernels_for_large_batches_are_equal_up_to_rounding():
    (found,) = run_processes(1, work.large_batches)
    for logits, gradients in found.values():
        assert logits < 1e-5
        assert gradients < 1e-6


SAID = {
    "twice": "SpecError: collection 'bags' is called twice in one forward: expected one call with the features of both",
    "no optimizer": "SpecError: table 't_f0' of collection 'bags' has no optimizer: expected an optimizer by apply_opt",
    "unknown optimizer": "SpecError: table 't_f0' of module 'bags': no optimizer LarsSGD here: expected one of Sgd, Ad",
    "torch optimizer": "SpecError: table 't_f0' of module 'bags': no optimizer RMSprop here: expected one of Sgd, Adag",
    "momentum": "SpecError: table 't_f0' of module 'bags': Sgd with momentum=0.9: expected only lr",
    "eps": "SpecError: table 't_f0': eps=0.0: expected more than 0 in 32 bits",
    "missing": "BatchError: collection 'bags': the KeyedJaggedTensor lacks feature 'f0'; it has f1, f2; add the featur",
    "id": "IdError: table 't_f0': feature 'f0', sample ",
    "plan": "SpecError: the plan has module 'bags': expected collections of this model only: 0",
    "plan of another table": "SpecError: the plan has table 'gone', which collection '0' lacks: expected the plan of t",
    "plan of other rows": "SpecError: tile t_f0[0:40, 0:8] on rank 0: expected a rectangle inside table 't_f0' (9 x 8)",
    "int8": "SpecError: table 't_f0' of module '0' is of data_type INT8: expected rows of FP32, FP16, BF16",
    "weighted mean": "SpecError: table 't_f0' of module '0' pools weighted ids by MEAN: expected SUM, or is_weighted=F",
    "fused collection": "SpecError: module '0' is a FusedEmbeddingBagCollection: expected EmbeddingBagCollection or E",
    "state": "StateError: embedding_bags.t_f0.weight: got (8, 8): expected (9, 8)",
}


@pytest.mark.slow
@TORCHREC
def test_wrong_use_is_refused_in_one_line():
    (said,) = run_processes(1, work.refusals)
    assert said.keys() == SAID.keys()
    for name, text in SAID.items():
        assert said[name].startswith(text)
        assert "\n" not in said[name]


@pytest.mark.slow
@pytest.mark.dist
@TORCHREC
def test_all_ranks_say_which_batch_was_bad_and_go_on():
    first, second = run_processes(2, work.a_bad_batch)
    assert first[0].startswith("AgreedError: rank 1 (ids of a batch): BatchError: collection '0': the Keyed")
    assert second[0].startswith("BatchError: collection '0': the KeyedJaggedTensor lacks feature 'f0'; it has f1")
    assert first[1] == second[1] == (work.BATCH, work.DIM)
