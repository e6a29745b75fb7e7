"""Prints what pyproject.toml asks for: its dependencies and those of extras, or of extras alone with --only."""

import sys
import tomllib
from pathlib import Path

with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [name for name in sys.argv[1:] if name != "--only"]
print(*([] if "--only" in sys.argv else project["dependencies"]), sep="\n")
print(*(one for name in extras for one in project["optional-dependencies"][name]), sep="\n")
