"""The public names, and that plans and specs need no tensor library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rowwise

PUBLIC = [  # a name is added or taken away here, in sight
    "Adagrad",
    "Adam",
    "AutoInt",
    "Batch",
    "BatchError",
    "CheckpointError",
    "Constant",
    "DCN",
    "DHEN",
    "DIEN",
    "DIN",
    "DLRM",
    "DataError",
    "DeepFM",
    "DynamicImageTower",
    "Embeddings",
    "FinalMLP",
    "FittedRun",
    "Ftrl",
    "GradientError",
    "GraphSage",
    "GraphTower",
    "HSTU",
    "IdError",
    "ImageTower",
    "ItemFrequency",
    "Jagged",
    "Lamb",
    "LightGCN",
    "Linear",
    "MMoE",
    "Managed",
    "ManagedEmbeddings",
    "MappedEmbeddings",
    "MaskNet",
    "Mlp",
    "NativeError",
    "NextItem",
    "Normal",
    "PLE",
    "PictureCopies",
    "PictureFolder",
    "PictureTower",
    "Plan",
    "Pooling",
    "RowType",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "RowwiseError",
    "SASRec",
    "Schedule",
    "Sgd",
    "SpecError",
    "StateError",
    "Table",
    "Tile",
    "Topology",
    "Tower",
    "TwoTower",
    "Uniform",
    "UnknownIdWarning",
    "Vectors",
    "WideDeep",
    "Wire",
    "Wukong",
    "XDeepFM",
    "asgi_app",
    "fit",
    "in_batch_bpr",
    "in_batch_softmax",
    "interact",
    "make_embeddings",
    "nearest_items",
    "top_items",
    "user_item_graph",
    "wide_tables",
    "write_pictures",
]


def test_all_is_what_can_be_imported():
    assert rowwise.__all__ == dir(rowwise) == PUBLIC
    assert all(getattr(rowwise, name).__name__ == name for name in PUBLIC)


def test_star_import():
    names = {}
    exec("from rowwise import *", names)
    assert set(PUBLIC) == set(names) - {"__builtins__"}


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(rowwise.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, alias.name, alias.asname) for node in block.body for alias in node.names}
    assert seen == {(getattr(rowwise, name).__module__, name, name) for name in PUBLIC}


def test_an_unknown_name_is_refused_with_the_known():
    with pytest.raises(AttributeError, match="'rowwise' has no attribute"):
        rowwise.Embedding  # noqa: B018


def test_errors_share_a_root():
    errors = [getattr(rowwise, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, rowwise.RowwiseError) for error in errors)
    assert issubclass(rowwise.UnknownIdWarning, UserWarning)


def test_plans_need_no_torch():
    code = """
import sys, rowwise
table = rowwise.Table(name="t", rows=10, dim=4, pooling=rowwise.Pooling.MEAN, optimizer=rowwise.Adam(
    schedule=rowwise.Schedule(warmup_steps=3)), row_type=rowwise.RowType.INT8)
plan = rowwise.Plan(world=1, tiles=(rowwise.Tile(table="t", rank=0, rows=(0, 10), cols=(0, 4)),))
rowwise.Plan.from_json(plan.to_json()).validate([table])
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
