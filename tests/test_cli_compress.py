"""`rowwise compress` as users meet it: what cannot be is one line, a killed one goes on, and what it writes trains."""

import json
import os
import re
import signal

import pytest
from compressible import write_recipe
from launching import started, wait_for

REFUSED = {
    "clicks.yaml --ratio 0.5": "--ratio 0.5: expected a compression above 1, such as 10",
    "clicks.yaml --ratio nan": "--ratio nan: expected a compression above 1, such as 10",
    "clicks.yaml --budget 10XB": "--budget 10XB: expected a size such as 500MB, 2GB or 48MiB",
    "clicks.yaml --budget 1GB": "a budget of 1,000,000,000 bytes: all tables take 74,560 uncompressed: expected a",
    "clicks.yaml --ratio 100": "a budget of 745 bytes: uncompressed tables take 960 of 74,560 (item)",
    "clicks.yaml --ratio 4 --methods lerned": "--methods: no method 'lerned'; did you mean 'learned'? There are hash,",
    "clicks.yaml --ratio 4 --minutes 0": "--minutes 0: expected a number of minutes above 0, such as 30",
    "clicks.yaml --ratio 4 --out full": "full has other files and no order.json: expected --out with a new folder",
    "clicks.yaml --ratio 4 --out clicks.yaml": "clicks.yaml is a file: expected a folder for measurements",
    "clicks.yaml --ratio 4 --set train.epoch=3": "no key 'epoch' in train; did you mean 'epochs'?",
    "click.yaml --ratio 4": "click.yaml: no such file: expected a recipe file",
    "movielens-two-tower --ratio 4": "model.kind=two_tower ranks items, and has no log loss",
}


@pytest.mark.parametrize("args", REFUSED)
def test_what_cannot_be_compressed_is_one_line_and_leaves_nothing(refused, tmp_path, args):
    write_recipe(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert REFUSED[args] in refused("compress", *args.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_history_that_cannot_be_is_one_line(command, tmp_path):
    write_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for condition, said in (("row < 0", "no training row passes"), ("weak < 4", "no column 'weak'")):
        code, _, err = command("compress", "clicks.yaml", "--ratio", "4", "--history", condition)
        assert code == 2
        assert said in err
        assert sorted(tmp_path.rglob("*")) == before


def compress(*args):
    return ("compress", "clicks.yaml", "--budget", "20kB", "--methods", "hash,learned", *args)


@pytest.mark.slow
def test_a_budget_becomes_a_recipe_that_trains(command, tmp_path):
    # Row 0 of a vocabulary is that of unknown ids. Its order, here that of popularity, is not the data's.
    (tmp_path / "user.vocab").write_text("".join(f"{number}\t{number + 1}\n" for number in range(1199)))
    user = {"column": "user", "vocabulary": "user.vocab"}
    columns = {"sparse": [user, *({"column": name, "ids": "direct"} for name in ("item", "seen"))]}
    write_recipe(tmp_path, data={"valid_share": 0.1}, columns=columns)
    code, out, err = command(*compress("--explain", "--out", "c", "--rows", "1500", "--history", "row < 3500"))
    assert (code, out) == (0, ""), err
    for said in ("user: 1,200 ids", "  choice: ", "use it  rowwise train c/recipe.yaml", "all tables: ", "noise"):
        assert said in err
    assert "warning table seen: neighbouring ids are alike" in err
    assert "warning measured on the validation rows of the recipe, a random share of its rows" in err
    advice = json.loads((tmp_path / "c" / "advice.json").read_text())
    assert advice["size_bytes"] <= advice["budget_bytes"] == 20_000
    page = (tmp_path / "c" / "report.html").read_text()
    assert page.count("<svg") == 2
    code, _, err = command("train", "c/recipe.yaml")
    assert code == 0, err
    code, _, err = command(*compress("--out", "c", "--rows", "1500", "--history", "row < 3000"))
    assert code == 2
    assert "measured with --history row < 3500, not row < 3000" in err


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_goes_on_after_a_kill(tmp_path, number):
    write_recipe(tmp_path)
    trials = tmp_path / "compression" / "trials.jsonl"
    with started(tmp_path, *compress()) as process:
        wait_for(lambda: trials.exists() and trials.read_text().count("\n") > 4, 120)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    before = trials.read_text()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.splitlines()[-2:] == [
            "trials are in compression; the same command continues",
            "rowwise: stopped by Ctrl-C",
        ]
    with trials.open("a") as file:
        file.write('{"asked":{"ta')
    with started(tmp_path, *compress()) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert trials.read_text().startswith(before)
    assert re.search(r"wrote   compression/recipe.yaml", err)
    assert not list((tmp_path / "compression").glob(".trial*"))
