"""Broken run folders, id maps, measurements and CSV files, through the functions that commands read them with."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import numpy as np
import pytest
from campaign import Campaign
from mutations import mutate_bytes, mutate_tree

from rowwise import Table
from rowwise.ingest.datasets.files import open_files
from rowwise.planning.calibrate.samples import read_samples
from rowwise.recipes.compress.folder import TrialFolder
from rowwise.report import write
from rowwise.tables.ids import file as id_map_file
from rowwise.tables.ids.rows import look_up_rows

GOLDEN = Path(__file__).parent / "golden" / "files"
RUN = ("recipe.yaml", "env.json", "result.json", "metrics.csv", "steps.csv", "stages.csv", "tables.csv", "plan.json")


class Page(HTMLParser):
    """What runs in a page: scripts, handlers and frames."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs if name.startswith("on")]
        self.active += [tag] if tag in ("script", "iframe", "object", "embed", "img") else []
        self.active += names


def active(path: Path) -> list[str]:
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page.active


@pytest.mark.slow
def test_run_folders(tmp_path: Path) -> None:
    campaign, random, run = Campaign("run folders"), Random(1), tmp_path / "run" / "1"
    run.mkdir(parents=True)
    good = {name: (GOLDEN / "run" / name).read_bytes() for name in RUN}
    for name, data in good.items():
        (run / name).write_bytes(data)
    scripts = active(write(run))

    def right(made: Path) -> None:
        assert active(made) == scripts or len(active(made)) < len(scripts), "something else runs in the page"
        assert "\x1b" not in made.read_text("utf-8")

    for number in range(200):
        name = RUN[number % len(RUN)]
        if name.endswith(".json") and number % 3:
            data = json.dumps(mutate_tree(json.loads(good[name]), random, changes=2, finite=False)).encode()
        else:
            data = mutate_bytes(good[name], random)
        (run / name).write_bytes(data)
        campaign.take((name, data), lambda: write(run), right)
        (run / name).write_bytes(good[name])
    (run / "recipe.yaml").unlink()
    campaign.take("no recipe", lambda: write(run), right)
    campaign.finish()


@pytest.mark.slow
def test_id_maps(tmp_path: Path) -> None:
    campaign, random, path = Campaign("id maps"), Random(2), tmp_path / "user.idmap"
    good = (GOLDEN / "user.idmap").read_bytes()
    table = Table(name="user", rows=50, dim=8)
    path.write_bytes(good)
    whole = id_map_file.load(path, table)

    def right(found: object) -> None:
        assert found.digest == whole.digest
        ids = np.arange(50)
        assert np.array_equal(look_up_rows(found, ids), look_up_rows(whole, ids))

    for _ in range(2000):
        data = mutate_bytes(good, random)
        path.write_bytes(data)
        campaign.take(data, lambda: id_map_file.load(path, table), right)
    campaign.finish()


@pytest.mark.slow
def test_measurements_and_trials(tmp_path: Path) -> None:
    campaign, random, path = Campaign("measurements and trials"), Random(3), tmp_path / "trials.jsonl"
    for number in range(1000):
        path.write_bytes(mutate_bytes(b'{"type": "SetSample", "took_s": 1}\n{"asked": {}}\n', random))
        if number % 2:
            campaign.take(path.read_bytes(), lambda: list(read_samples(path)), lambda found: None)
        else:
            campaign.take(path.read_bytes(), lambda: TrialFolder(tmp_path).read(), lambda found: None)
    campaign.finish()


@pytest.mark.slow
def test_files_of_text(tmp_path: Path) -> None:
    campaign, random, path = Campaign("CSV files of rows"), Random(5), tmp_path / "rows.csv"
    good = b"label,user,price\n" + b"".join(b"%d,u%d,%d.5\n" % (k % 2, k, k) for k in range(30))

    def read() -> int:
        reader = open_files(str(path))
        names = reader.schema.names
        return sum(reader.read(split, names).num_rows for split in reader.splits())

    for _ in range(1500):
        data = mutate_bytes(good, random)
        path.write_bytes(data)
        campaign.take(data, read, lambda rows: None)
    campaign.finish()


@pytest.mark.slow
def test_what_stands_in_the_place_of_a_file_of_a_run(tmp_path: Path) -> None:
    """A report is made of what is left: nothing waits for a FIFO or reads a device to its end."""
    import os

    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", run, ignore=shutil.ignore_patterns("ckpt"))
    for name in ("env.json", "metrics.csv", "tables.csv", "warnings.txt", "slices.csv"):
        (run / name).unlink(missing_ok=True)
    os.mkfifo(run / "metrics.csv")
    (run / "env.json").mkdir()
    (run / "tables.csv").symlink_to("/dev/zero")
    with (run / "slices.csv").open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    page = write(run).read_text()
    for told in ("metrics.csv could not be read", "env.json could not be read", "slices.csv could not be read"):
        assert told in page
