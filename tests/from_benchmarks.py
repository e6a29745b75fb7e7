"""Modules of benchmarks/, by their files: that folder on the path would hide packages of tests."""

import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def planner_tasks():
    """The tasks that planners are compared on."""
    if "planner_tasks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("planner_tasks", BENCHMARKS / "planner_tasks.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["planner_tasks"] = module
        spec.loader.exec_module(module)
    return sys.modules["planner_tasks"]
