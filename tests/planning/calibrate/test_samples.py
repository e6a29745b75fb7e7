"""Lines that were measured: whole ones are kept, whatever happened to the last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.planning.calibrate.draw import Population, SetLimits, draw_set
from rowwise.planning.calibrate.folder import MeasurementSpec, Tally, lock_folder, open_folder
from rowwise.planning.calibrate.samples import LinkSample, SetSample, read_samples, truncate_partial_line, write_sample

LIMITS = SetLimits(pool_bytes=10_000_000)


def a_set(number=0, took_s=0.5, rank=0):
    drawn = draw_set(Population(), LIMITS, 0, number, rank)
    return SetSample(
        number=number, rank=rank, batch=drawn.batch, workloads=drawn.workloads, lookup_s=1e-3, update_s=2e-3,
        took_s=took_s,
    )  # fmt: skip


def an_exchange(**numbers):
    two = (1e-3, 2e-3)
    usual = {"batch": 512, "dim_W": (64, 32), "ids_W": (500, 400), "skew_W": (0.0, 0.0)}
    usual |= {"number": 0, "route_W": two, "exchange_W": two, "return_W": two, "took_s": 0.25}
    return LinkSample(layout="table_wise", hosts=1, **usual | numbers)


@pytest.fixture
def folder(tmp_path):
    return open_folder(tmp_path / "made", MeasurementSpec(limits=LIMITS))


def test_what_is_written_is_read(tmp_path):
    samples = [a_set(), an_exchange(), a_set(7)]
    for sample in samples:
        write_sample(tmp_path / "x.jsonl", sample)
    assert list(read_samples(tmp_path / "x.jsonl")) == samples


@given(st.data())
def test_a_file_cut_anywhere_goes_on_with_whole_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "x.jsonl"
    samples = [an_exchange(), a_set(), an_exchange()]
    for sample in samples:
        write_sample(path, sample)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = samples[: whole[:cut].count(b"\n")]
    assert list(read_samples(path)) == kept
    truncate_partial_line(path)
    write_sample(path, samples[0])
    assert list(read_samples(path)) == [*kept, samples[0]]


def test_a_line_that_is_no_measurement_is_named(tmp_path):
    write_sample(tmp_path / "x.jsonl", an_exchange())
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('{"type":"link","number":0}\n')
    with pytest.raises(SpecError, match=r"x\.jsonl, line 2"):
        list(read_samples(tmp_path / "x.jsonl"))


def test_a_tally_counts_the_slowest_rank_as_files_grow(folder):
    tally = Tally(folder)
    assert tally.update() == 0
    write_sample(folder.sets_of(0), a_set(took_s=2))
    write_sample(folder.sets_of(1), a_set(took_s=3, rank=1))
    with folder.links.open("ab") as file:
        file.write(b'{"type":"li')
    assert tally.update() == 3
    truncate_partial_line(folder.links)
    write_sample(folder.links, an_exchange())
    assert tally.update() == 3.25
    assert (tally.sets, tally.links) == (2, 1)


def test_the_same_order_goes_on_and_another_is_refused(folder):
    write_sample(folder.sets_of(0), a_set())
    again = open_folder(folder.path, MeasurementSpec(limits=SetLimits(pool_bytes=5)))  # less memory than at first
    assert again.read_spec().limits == LIMITS
    assert again.read() == [a_set()]
    for change, said in {"seed": r"--seed 0, not 1", "threads": r"--threads 1, not 2"}.items():
        wanted = MeasurementSpec(limits=LIMITS, **{change: 1 if change == "seed" else 2})
        with pytest.raises(
            SpecError, match=rf"order\.json: measured with {said}: expected the same options, or another folder"
        ):
            open_folder(folder.path, wanted)
    with pytest.raises(SpecError, match="measured with other tables"):
        open_folder(folder.path, MeasurementSpec(limits=LIMITS, tables=a_set().workloads))


def test_what_is_no_folder_for_this_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="file: is a file"):
        open_folder(tmp_path / "file", MeasurementSpec(limits=LIMITS))
    with pytest.raises(SpecError, match="empty, and without"):
        open_folder(tmp_path, MeasurementSpec(limits=LIMITS))
    (tmp_path / "order.json").write_text("{}")
    with pytest.raises(SpecError, match="specification of a calibration"):
        open_folder(tmp_path, MeasurementSpec(limits=LIMITS))


def test_one_process_at_a_time(folder):
    write_sample(folder.sets_of(0), a_set())
    with folder.sets_of(0).open("ab") as file:
        file.write(b"torn")
    with lock_folder(folder), pytest.raises(SpecError, match="another process measures"), lock_folder(folder):
        pass
    with lock_folder(folder):
        assert folder.sets_of(0).read_bytes().endswith(b"}\n")
