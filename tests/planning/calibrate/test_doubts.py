"""When a profile is not to be trusted: it says so, its networks are not used, and plans say that, too."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_cli import rowwise_cli
from test_fit import ABOUT, exchanges, made_up

from rowwise.planning.calibrate.fit import BOUNDED_NETWORKS, fit_profile
from rowwise.planning.calibrate.train_network import NetworkShape
from rowwise.planning.calibrate.trust import MAX_WAITED, find_doubts, select_undisturbed, waited_s
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.planning.perf.learned import LearnedModel, model_of, profile_warnings
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.spec import Topology

FINE = {"disturbed": 0.0, "tau": 0.94, "error": 0.1, "noise": 0.1, "drift": 0.1}
BAD = {
    "disturbed": (0.8, "other processes had the processors during 80% of the measurements"),
    "noise": (0.4, "a set that is measured twice differs by 40%"),
    "drift": (0.5, "the machine's speed varied by 50%"),
    "tau": (0.04, "rank correlation with sets held out is 0.04, less than 0.8"),
    "error": (0.65, "the error on sets held out is 65%, more than 25%"),
}
DOUBT = "the machine's speed varied by 50%"
WAITING = """
import os, time
from rowwise.planning.calibrate.trust import waited_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    while os.getppid() != 1:
        pass
    os._exit(0)
begin, before = time.perf_counter(), waited_s()
while time.perf_counter() - begin < 1:
    pass
print((waited_s() - before) / (time.perf_counter() - begin), flush=True)
os.kill(0, 9)
"""


@pytest.mark.parametrize("what", BAD)
def test_each_fault_is_a_reason(what):
    assert find_doubts(**FINE) == ()
    value, words = BAD[what]
    assert find_doubts(**(FINE | {what: value})) == (words,)


def test_all_faults_are_said():
    assert len(find_doubts(**{what: value for what, (value, _) in BAD.items()})) == len(BAD)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 30))
def test_disturbed_sets_are_left_out_where_enough_are_left(waited, fewest):
    one = next(iter(made_up(1)))
    sets = [structs.replace(one, waited=share) for share in waited]
    kept, quiet = select_undisturbed(sets, fewest), [s for s in sets if s.waited <= MAX_WAITED]
    assert kept == (quiet if len(quiet) >= fewest and 2 * len(quiet) >= len(sets) else sets)


def test_the_system_counts_waiting_in_nanoseconds(tmp_path):
    counters = tmp_path / "schedstat"
    assert waited_s(counters) == 0
    counters.write_text("7000000000 2500000000 12\n")
    assert waited_s(counters) == 2.5


@pytest.mark.dist
@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the system does not count waiting")
def test_a_thread_that_shares_its_processor_has_waited():
    found = subprocess.run(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True, timeout=60, start_new_session=True
    )
    assert 4 * MAX_WAITED < float(found.stdout) <= 1


def test_networks_that_are_doubted_do_not_predict():
    xeon = hardware_named("xeon")
    doubted = structs.replace(xeon, kernels=structs.replace(xeon.kernels, doubt=DOUBT))
    assert isinstance(model_of(xeon, Topology()), LearnedModel)
    assert isinstance(model_of(doubted, Topology()), Roofline)
    assert profile_warnings(xeon) == profile_warnings(hardware_named("cpu")) == ()
    (line,) = profile_warnings(doubted)
    why = f"the networks of {xeon.name} are not to be trusted: {DOUBT}"
    assert line == f"costs are a roofline of fitted rates, because {why}"
    assert read_hardware(doubted.to_json()) == doubted
    assert "doubt" not in xeon.to_json()


@pytest.mark.slow
def test_a_plan_says_that_its_profile_is_doubted(tmp_path):
    xeon = hardware_named("xeon")
    doubted = structs.replace(xeon, kernels=structs.replace(xeon.kernels, doubt=DOUBT))
    (tmp_path / "machine.json").write_text(doubted.to_json())
    (tmp_path / "tables.csv").write_text("name,rows,dim,pooling\na,10000,16,1\nb,20000,32,3\n")
    order = ("plan", "--tables", "tables.csv", "--topology", "2xmachine.json")
    planned = rowwise_cli(*order, cwd=tmp_path)
    assert planned.returncode == 0
    (line,) = profile_warnings(doubted)
    assert line in " ".join(planned.stdout.split())
    assert "not to be trusted" not in rowwise_cli(*order, "--model", "learned", cwd=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_measurements_that_are_noise_give_a_profile_that_says_so():
    rng = np.random.default_rng(0)
    wild = np.exp(rng.normal(0, 1.0, 1000))
    samples = [
        structs.replace(s, lookup_s=s.lookup_s * wild[i], update_s=s.update_s * wild[i])
        for i, s in enumerate(made_up(300))
    ]
    fitted = fit_profile(
        [*samples, *exchanges(60)], ABOUT, shapes={BOUNDED_NETWORKS: NetworkShape(steps=200, batch=256)}
    )
    assert fitted.quality.doubts
    assert fitted.hardware.kernels.doubt == "; ".join(fitted.quality.doubts)
    assert fitted.lines()[-1].startswith("NOT TO BE TRUSTED: ")
    assert isinstance(model_of(fitted.hardware, Topology()), Roofline)
