"""A calibration by real processes: it keeps to its time, is killed, and goes on."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import ENVIRONMENT, PYTHON, wait_for

from rowwise.planning.calibrate.draw import SetLimits
from rowwise.planning.calibrate.folder import MeasurementFolder, MeasurementSpec, Tally, open_folder
from rowwise.planning.calibrate.measure import GROUP, choose_turn, measure
from rowwise.planning.calibrate.samples import SetSample

LIMITS = SetLimits(pool_bytes=20_000_000, vector_floats=1 << 20, max_s=5e-3)
PROGRAM = """
import sys
from pathlib import Path
from rowwise.planning.calibrate.folder import MeasurementFolder
from rowwise.planning.calibrate.measure import measure

if __name__ == "__main__":
    folder = MeasurementFolder(Path(sys.argv[1]))
    measure(folder.read_spec(), folder, float(sys.argv[2]), lambda text, share: None)
"""


def silent(text, share):
    pass


def test_turns_come_back_to_sets_that_were_measured():
    turns = [choose_turn(k) for k in range(20 * GROUP)]
    new = [t.number for t in turns if not t.again]
    assert new == list(range(len(new)))
    back = [(k, t.number) for k, t in enumerate(turns) if t.again]
    assert len(back) == 20
    assert len({number for _, number in back}) == 20
    for k, number in back:
        assert turns.index((number, False)) < k
    assert all(k - turns.index((number, False)) > 3 * GROUP for k, number in back[6:])


@pytest.mark.dist
def test_one_rank_measures_sets_alone_and_keeps_to_its_time(tmp_path):
    folder = open_folder(tmp_path / "made", MeasurementSpec(limits=LIMITS))
    told = []
    measure(folder.read_spec(), folder, 0.05, lambda text, share: told.append(share))
    samples = folder.read()
    assert len(samples) > 5
    assert all(isinstance(sample, SetSample) for sample in samples)
    assert 3 <= Tally(folder).update() < 9
    assert told[-1] == 1
    assert told == sorted(told)
    before = folder.sets_of(0).read_bytes()
    measure(folder.read_spec(), folder, 0.05, silent)
    assert folder.sets_of(0).read_bytes() == before


def of_session(leader):
    """Processes that one began, itself among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def begin(folder, minutes, temporary):
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    command = [*PYTHON, "-c", PROGRAM, str(folder.path), str(minutes)]
    return subprocess.Popen(command, env=environment, start_new_session=True)


@pytest.mark.dist
def test_killed_in_the_middle_it_goes_on(tmp_path):
    folder = open_folder(tmp_path / "made", MeasurementSpec(world=2, limits=LIMITS))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    killed = begin(folder, 10, temporary)
    try:
        wait_for(lambda: folder.links.exists() and len(folder.read()) > 12, 120)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    wait_for(lambda: not of_session(killed.pid), 20)
    assert not list(temporary.glob("rowwise-*"))
    done_s = Tally(folder).update()
    assert done_s > 0
    with folder.sets_of(1).open("ab") as file:
        file.write(b'{"type":"set","numb')
    before = folder.read()

    again = begin(folder, (done_s + 4) / 60, temporary)
    assert again.wait(120) == 0
    wait_for(lambda: not of_session(again.pid), 20)
    assert not list(temporary.glob("rowwise-*"))
    after = folder.read()
    assert len(after) > len(before)
    assert [s for s in after if s in before] == before
    assert Tally(folder).update() >= done_s + 4
    for rank in range(2):
        sets = [s for s in after if isinstance(s, SetSample) and s.rank == rank]
        assert [(s.number, s.again) for s in sets] == [choose_turn(k) for k in range(len(sets))]
    links = [s for s in after if not isinstance(s, SetSample)]
    assert [s.number for s in links] == list(range(len(links)))
    assert MeasurementFolder(folder.path).read() == after
