"""The documentation as a site: it builds without a warning, and every page can be read on a telephone."""

import functools
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from devtools import browser, complaints

ROOT = Path(__file__).parents[1]
MKDOCS = pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra 'docs'")
WIDTH = 400
FOUND = """new Promise(done => {
    const look = () => document.querySelector(".md-search-result__item") ? done(true) : setTimeout(look, 50);
    look();
})"""


@pytest.fixture
def tools(monkeypatch):
    """Makes modules of `tools` importable."""
    monkeypatch.syspath_prepend(ROOT / "tools")


def test_every_key_of_a_recipe_has_a_meaning(tools):
    import docs_recipe

    want = "expected a comment beside the field, or a line in MEANINGS of tools/docs_recipe.py"
    assert docs_recipe.undocumented() == [], want
    assert docs_recipe.superfluous() == [], "these lines of MEANINGS are of fields with a comment, or of none"


def test_the_reference_of_recipes_has_every_key(tools):
    import docs_recipe

    text = docs_recipe.reference()
    for kind in docs_recipe.sections():
        section = text.split(f"{{#{docs_recipe.anchor_of(kind)}}}")[1].split("\n#")[0]
        assert all(f"| `{field.encode_name}` |" in section for field in docs_recipe.keys_of(kind))


def test_anchors_of_the_reference_are_unique(tools):
    import docs_recipe

    anchors = [docs_recipe.anchor_of(kind) for kind in docs_recipe.sections()]
    assert len(anchors) == len(set(anchors))


def test_the_reference_of_commands_has_every_option(tools):
    import docs_commands

    commands, text = docs_commands.all_commands(), docs_commands.reference()
    assert list(docs_commands.panels()) == ["Start", "Train", "Understand", "Scale", "Serve", "Maintain"]
    assert {"rowwise train", "rowwise eval", "rowwise data inspect", "rowwise ckpt import"} <= commands.keys()
    for name, command in commands.items():
        section = text.split(f"### {name}\n")[1].split("\n##")[0]
        options = {option for one in command.params for option in one.opts if option.startswith("--")}
        assert all(f"`{option}" in section for option in options - {"--help"}), name


def test_comments_are_those_of_the_field(tools):
    from field_comments import comments_of

    lines = ["a: int  # one", "# two", "# lines", "b: int = 0", "c: int = (", "    1  # three", ")", "d: int"]
    source = "\n    ".join(["class A:", *lines]) + "\n"
    assert comments_of(source) == {2: "one", 5: "two lines", 6: "three"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """The address of a folder."""
    servers = []

    def at(folder: Path) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield at
    for server in servers:
        server.shutdown()
        server.server_close()


def faults(page, host: str, address: str) -> list[str]:
    found = complaints(page.visit(host + address), host)
    width = page.value("document.documentElement.scrollWidth")
    return [*found, *([f"is {width} pixels wide"] if width > WIDTH else [])]


@pytest.mark.slow
def test_a_bad_page_is_noticed(tmp_path, serve):
    bad = {
        "error.html": "<script>console.error('lost')</script>",
        "thrown.html": "<script>throw new Error('lost')</script>",
        "missing.html": "<img src=nowhere.png>",
        "wide.html": "<div style='width: 500px'>x</div>",
        "elsewhere.html": "<img src='http://192.0.2.1/x.png' loading=lazy>",
    }
    good = "<!doctype html><link rel=icon href='data:,'><p>good"
    for name, text in (bad | {"good.html": ""}).items():
        (tmp_path / name).write_text(good + text)
    host = serve(tmp_path)
    with browser() as page:
        page.resize(WIDTH, 800)
        assert faults(page, host, "good.html") == []
        assert all(faults(page, host, name) for name in bad)


@pytest.mark.slow
@MKDOCS
def test_the_site_builds_and_reads_well(tmp_path, serve):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html"))
    assert {"index.html", "reference/recipe.html", "reference/rowwise-planner.html", "glossary.html"} <= set(pages)
    assert "arena" in (tmp_path / "glossary.html").read_text()
    host = serve(tmp_path)
    with browser() as page:
        page.resize(WIDTH, 800)
        found = {name: faults(page, host, name) for name in pages}
        assert not any(found.values()), {name: said for name, said in found.items() if said}
        page.visit(f"{host}index.html?q=virtual+shard")
        assert page.value(FOUND), "search finds nothing"
