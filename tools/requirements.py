"""Prints what pyproject.toml asks for: `dependencies`, and extras by name."""

import sys
import tomllib
from pathlib import Path

with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
groups = project["optional-dependencies"] | {"dependencies": project["dependencies"]}
print(*(one for name in sys.argv[1:] for one in groups[name]), sep="\n")
