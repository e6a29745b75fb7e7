"""Options and arguments shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

BATCH = 65536  # default global batch size of tables without a recipe
MAX_SEED = (1 << 31) - 1
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RecipeName = Annotated[str, typer.Argument(help="A YAML file, or the name of a built-in recipe (see rowwise ls).")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the recipe: --set train.epochs=2; may be repeated."
    ),
]
RunArgument = Annotated[Path, typer.Argument(help="Run folder, such as runs/dlrm-synthetic/1.")]
Which = Annotated[str, typer.Option(help="Checkpoint to use: best, last or step-<number>.")]
Dim = Annotated[int | None, typer.Option(min=1, help="Default embedding dimension, for tables without one in FILE.")]
GlobalBatch = Annotated[int | None, typer.Option(min=1, help=f"Global batch size (default: {BATCH}, or the recipe's).")]
MemoryForRows = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory budget for rows, such as 8GB; larger tables are cached (default: no limit)."
    ),
]
Redis = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Redis, or nodes of a Redis Cluster, as a row cache shared by servers."),
]
HtmlFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as an HTML page.")]
