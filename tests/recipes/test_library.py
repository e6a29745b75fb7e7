"""The recipes that ship: each can be read, says what to expect, and can be found and copied."""

import re

import pytest
from test_cli import rowwise_cli

from rowwise import SpecError
from rowwise.ingest.datasets.catalog import FROM_FILES, GETTERS, get
from rowwise.recipes.find import LIBRARY, copy, find, load, names
from rowwise.recipes.runs import TrainingRun


@pytest.mark.parametrize("name", names())
def test_what_ships_is_complete(name):
    recipe = load(name)
    about = recipe.about
    assert recipe.name == name
    assert about.what
    assert re.fullmatch(f"rowwise train {name}( --nproc [24])?", about.run)
    assert about.spread.keys() <= about.expect.keys()
    if recipe.data.dataset in FROM_FILES:  # whose files come from the user
        assert about.published.keys() == {"auc", "loss"}
        assert about.published_by.startswith("BARS")
    if not about.published:
        assert about.expect
        assert about.time_s
        assert about.memory_gb
        assert about.machine


def test_names_are_those_of_the_files():
    assert names() == sorted(path.stem for path in LIBRARY.iterdir())
    assert "dlrm-synthetic" in names()


def test_find(tmp_path):
    assert find("dlrm-synthetic") == LIBRARY / "dlrm-synthetic.yaml"
    with pytest.raises(SpecError, match=r"mean 'dlrm-synthetic'\?"):
        find("dlrm-syntetic")
    with pytest.raises(SpecError, match="recipe 'zzz': expected one"):
        find("zzz")
    with pytest.raises(SpecError, match=r"zzz\.yaml: no such"):
        find("zzz.yaml")
    (tmp_path / "mine").write_text("data: {dataset: synthetic}")  # any file will do
    assert find(str(tmp_path / "mine")) == tmp_path / "mine"
    with pytest.raises(SpecError, match="folder"):
        load(str(tmp_path))


def test_copies_never_overwrite(tmp_path):
    place = copy("dlrm-synthetic", tmp_path)
    assert place == tmp_path / "dlrm-synthetic.yaml"
    assert place.read_text() == find("dlrm-synthetic").read_text()
    place.write_text("mine")
    with pytest.raises(SpecError, match=r"dlrm-synthetic\.yaml exists"):
        copy("dlrm-synthetic", tmp_path)
    with pytest.raises(SpecError, match="exists: expected another name"):
        copy("dlrm-synthetic", place)
    assert place.read_text() == "mine"
    assert copy("dlrm-synthetic", tmp_path / "new" / "b.yaml").is_file()
    with pytest.raises(SpecError, match=r"ends in \.yaml"):
        copy("dlrm-synthetic", tmp_path / "c")


@pytest.mark.slow
def test_the_commands(tmp_path):
    listed = rowwise_cli("ls")
    assert (listed.returncode, listed.stderr) == (0, "")
    for name in names():
        assert re.search(rf"^{re.escape(name)}  ", listed.stdout, re.MULTILINE)
        assert load(name).about.what in " ".join(listed.stdout.split())
    copied = rowwise_cli("cp", "dlrm-synthetic", "mine.yaml", cwd=tmp_path)
    assert copied.stdout == "wrote mine.yaml; train it with: rowwise train mine.yaml\n"
    again = rowwise_cli("cp", "dlrm-synthetic", "mine.yaml", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "rowwise: mine.yaml exists: expected another name\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm-synthetic", "movielens-wide-deep"])
def test_what_is_promised_is_reached(name, tmp_path):
    recipe = load(name, [f"data.folder={tmp_path}"])
    if recipe.data.dataset in GETTERS:
        get(recipe.data.dataset, tmp_path)
    found = TrainingRun.start(recipe, tmp_path / "runs").go().test["label"]
    # From both sides: what is much better than promised has seen its labels.
    assert found["auc"] == pytest.approx(recipe.about.expect["auc"], abs=0.004)
    assert found["ne"] == pytest.approx(recipe.about.expect["ne"], abs=0.008)
