"""Names: a class name means one thing, each package is in the table of layers, and each module says what it is for."""

import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/rowwise"
TEXTS = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, text in TEXTS.items():
        for name in re.findall(r"(?m)^ *class (\w+)[:(\[]", text):
            places[name].append(str(path.relative_to(SOURCE)))
    assert len(places) > 500
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_each_package_has_its_layer_and_each_module_says_what_it_is_for():
    table = (SOURCE.parents[1] / "docs/ARCHITECTURE.md").read_text().split("\n## Layers\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", table))))
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    loose = {path.stem for path in SOURCE.glob("*.py") if path.stem[:2] != "__"}
    assert packages | loose == named
    assert not [path for path, text in TEXTS.items() if not text.startswith('"""')]
