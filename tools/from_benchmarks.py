"""Modules of benchmarks/parts, by their file: the folder above on the path would hide packages of tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def part(name: str) -> ModuleType:
    """What several benchmarks share, such as `planner_tasks`."""
    if "parts" not in sys.modules:
        folder = BENCHMARKS / "parts"
        spec = importlib.util.spec_from_file_location(
            "parts", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules["parts"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["parts"])
    return importlib.import_module(f"parts.{name}")


def planner_tasks() -> ModuleType:
    """The tasks that planners are compared on."""
    return part("planner_tasks")
