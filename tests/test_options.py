"""Nothing that a command is given is ignored: every option and argument is refused in one line where it is nonsense.

The options are those of the commands themselves: one without a line in `options.py` fails.
"""

import os
import re
import shutil
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
import typer
from options import BASE, COMBINATIONS, EFFECTS, FREE, LONG, NONSENSE
from PIL import Image
from pyarrow import parquet as pq
from recipes.test_hosts import make_network
from small import trained

from rowwise.cli.conflicts import RULES, Excludes, Needs, OneOf
from rowwise.cli.main import make_app
from rowwise.recipes.export import export
from rowwise.recipes.semantic import FitOptions, fit_ids, read_vectors
from rowwise.serve.package import LOGIT, find_version, read_golden
from rowwise.serve.record import REQUEST, VERSION
from rowwise.tables.ids.arrays import entry_map
from rowwise.tables.ids.file import save


@cache
def whole():
    return typer.main.get_command(make_app())


def commands(group, words=()):
    """Of a group and those inside it: what they are called by, and their options and arguments."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*words, name))
        else:
            yield " ".join((*words, name)), [p for p in one.params if p.name != "help"]


@cache
def params():
    return dict(commands(whole()))


def test_every_option_is_in_the_table():
    there = {f"{command} {param.opts[0]}" for command, found in params().items() for param in found}
    assert {*NONSENSE, *FREE} == there
    assert not NONSENSE.keys() & FREE.keys()
    assert BASE.keys() == params().keys()


def breaches():
    """Of every rule: options that break it together or alone, and what the line has to name."""
    for command, rules in RULES.items():
        for rule in rules:
            options = rule.options.split()
            match rule:
                case Excludes():
                    broken = [(pair, pair) for pair in product(options, rule.others.split())]
                case Needs():
                    broken = [((option,), (option, *rule.others.split())) for option in options]
                case OneOf():
                    broken = [((), options), *((pair, pair) for pair in combinations(options, 2))]
            yield from (pytest.param(command, *one, id=" ".join((command, *one[0]))) for one in broken)


def typed(command, given):
    """A call with these options, and what has to be there; values are what any type takes."""
    words = command.split()
    for param in params()[command]:
        names = [name if name.startswith("-") else name.upper() for name in (*param.opts, *param.secondary_opts)]
        for name in names:
            if name in given or (param.required and name == names[0]):
                words += [name] * name.startswith("-") + ["1"] * (not getattr(param, "is_flag", False))
    return words


@pytest.mark.parametrize(("which", "given", "named"), list(breaches()))
def test_options_that_do_not_go_together_are_named(which, given, named, refused, tmp_path):
    line = refused(*typed(which, given))
    assert {*named} <= {*re.findall(r"[\w-]+", line)}
    assert ": expected " in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What is given to commands, by the names in the table."""
    home = tmp_path_factory.mktemp("given")
    tables = {"each": {"user": {"id_map": {"kind": "hash", "rows": 20}}}}
    run, _ = trained(home, train={"epochs": 1, "steps": 2}, tables=tables)
    export(run.folder.path, home / "models")
    (home / "folder").mkdir()
    (home / "photos").mkdir()
    Image.new("RGB", (20, 12), "red").save(home / "photos/red.png")
    write_records(home)
    os.mkfifo(home / "fifo")
    (home / "tables.csv").write_text("name,rows,dim,pooling\nuser,50,8,1\nitem,30,8,1\n")
    (home / "net.json").write_text(make_network().to_json())
    fit_ids(read_vectors(str(home / "rows.parquet"), "row", "row"), home / "ids", "row", "row", FitOptions(sizes=(4,)))
    save(home / "user.map", "user", entry_map(50, np.arange(50) % 7, 7))
    torch.save({"embedding_bags.user.weight": torch.zeros(50, 8)}, home / "weights.pt")
    return {
        "home": str(home), "run": str(run.folder.path), "recipe": str(run.folder.path / "recipe.yaml"),
        "rows": str(home / "rows.parquet"), "folder": str(home / "folder"), "fifo": str(home / "fifo"),
        "tables": str(home / "tables.csv"), "map": str(home / "user.map"), "models": str(home / "models"),
        "records": str(home / "records"), "pictures": str(home / "photos"),
        "weights": str(home / "weights.pt"), "net": str(home / "net.json"), "ids": str(home / "ids"),
    }  # fmt: skip


def write_records(home):
    """As a server records: the golden rows of the version, and their logits."""
    golden = read_golden(find_version(home / "models").path)
    table = golden.rows.append_column(LOGIT + "label", golden.logits["label"])
    for name in (REQUEST, VERSION):
        table = table.append_column(name, [[1] * len(table)])
    (home / "records").mkdir()
    pq.write_table(table, home / "records/1.parquet")


def arguments(command, given, files):
    """As they are typed."""
    made = [f"{name}={value}" for name, value in given.items() if name.startswith("-")]
    names = [param.opts[0] for param in params()[command]]
    made += [given[name] for name in names if name in given and not name.startswith("-")]
    return [*command.split(), *(text.format(**files) for text in made)]


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(command, given, files, more=()):
        with pytest.raises(SystemExit) as ended:
            whole()([*arguments(command, given, files), *more])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(BASE.keys() - LONG))
def test_the_base_of_a_command_is_right(command, run, files, tmp_path):
    own = shutil.copytree(files["run"], tmp_path / "run")
    code, _, err = run(command, BASE[command], files | {"run": str(own)})
    assert code == 0, err


FEW = 2  # values of each option in the fast tests


@pytest.mark.parametrize("count", [FEW, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("which", NONSENSE)
def test_nonsense_is_refused(which, count, run, files, tmp_path):
    command, _, name = which.rpartition(" ")
    wrong = []
    for value in NONSENSE[which][:count]:
        code, out, err = run(command, BASE[command] | {name: value}, files)
        one_line = err.startswith("Usage: ") or (err.startswith("rowwise: ") and err.count("\n") == 1)
        if (code, out) != (2, "") or not one_line or len(err) > 2000 or list(tmp_path.iterdir()):
            wrong.append((value, code, out, err))
    assert wrong == []


@pytest.mark.parametrize("which", COMBINATIONS)
def test_what_has_no_effect_together_is_refused(which, run, files, tmp_path):
    command = next(name for name in sorted(BASE, key=len, reverse=True) if which.startswith(f"{name} "))
    more = which.removeprefix(command).format(**files).split()
    code, out, err = run(command, BASE[command], files, more)
    assert (code, out) == (2, "")
    assert COMBINATIONS[which] in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", EFFECTS)
def test_a_flag_has_an_effect(which, run, files, tmp_path, monkeypatch):
    """What is said, without numbers and lines of what took long, and what is written, with sizes of tensors.

    Without the flag it is twice the same.
    """
    command, _, flag = which.rpartition(" ")
    found = []
    for number, more in enumerate([(), (), (flag,)]):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        run_of_own = shutil.copytree(files["run"], place / "run")
        code, out, err = run(command, BASE[command], files | {"run": str(run_of_own)}, more)
        assert code == 0, err
        said = [re.sub(r"(?m)^(step|data)  .*$", "", text.replace(str(place), "")) for text in (out, err)]
        said = [re.sub(r"[\d.,]+", "#", text) for text in said]
        written = {str(p.relative_to(place)): p.suffix in (".safetensors", ".pt") and p.stat().st_size
                   for p in place.rglob("*")}  # fmt: skip
        found.append(([" ".join(text.split()) for text in said], written))
    assert found[0] == found[1]
    assert found[2] != found[0]


@pytest.mark.parametrize("command", ["train", "cp", "compress"])
@pytest.mark.parametrize(("name", "kind"), [("fifo", "a FIFO"), ("folder", "a folder")])
def test_a_recipe_that_is_no_file_is_said_to_be_what_it_is(command, name, kind, run, files):
    _, _, err = run(command, BASE[command] | {"recipe": f"{{{name}}}"}, files)
    assert f"{files[name]}: " in err
    assert f"this is {kind}: expected a regular file" in err
