"""The search space: the recipe's section `tune`, or default ranges around the recipe's values."""

import json
from collections.abc import Mapping
from typing import Any

from rowwise.base.errors import SpecError
from rowwise.recipes.model_configs import layers_of
from rowwise.recipes.recipe import Recipe, TuneRange

RATE, BATCH, WIDTH = 10.0, 4, 2  # factors below and above a recipe's learning rates, batch and layers
DIMS = (4, 8, 16, 32, 64)
MAX_DROPOUT = 0.5
DECAYS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
LAYERS = ("bottom", "top", "deep")

Space = dict[str, TuneRange]


def search_space(recipe: Recipe, sections: Mapping[str, Any]) -> Space:
    """The ranges of a recipe by key; `sections` is its file as plain data."""
    return dict(recipe.tune) or _usual_space(recipe, sections)


def _usual_space(recipe: Recipe, sections: Mapping[str, Any]) -> Space:
    lr, batch = recipe.train.optimizer.lr, recipe.train.batch
    space = {
        "train.optimizer.lr": TuneRange(low=lr / RATE, high=lr * RATE, log=True),
        "train.batch": TuneRange(choices=tuple(n for n in (batch // BATCH, batch // 2, batch, batch * 2) if n)),
    }
    table = sections.get("tables", {}).get("all", {}) if not recipe.tables.list else {}
    rows = recipe.tables.all.optimizer
    if rows is not None and "optimizer" in table:
        space["tables.all.optimizer.lr"] = TuneRange(low=rows.lr / RATE, high=rows.lr * RATE, log=True)
        if hasattr(rows, "weight_decay"):
            space["tables.all.optimizer.weight_decay"] = TuneRange(choices=tuple(sorted({*DECAYS, rows.weight_decay})))
    if recipe.tables.all.dim is not None:
        space["tables.all.dim"] = TuneRange(choices=tuple(sorted({*DIMS, recipe.tables.all.dim})))
    if hasattr(recipe.model, "dropout"):
        space["model.dropout"] = TuneRange(low=0.0, high=MAX_DROPOUT)
    for key, sizes in layers_of(recipe.model).items():
        if sizes and key in LAYERS:
            narrow, wide = ([max(1, int(n * factor)) for n in sizes] for factor in (1 / WIDTH, WIDTH))
            space[f"model.{key}"] = TuneRange(choices=(tuple(narrow), sizes, tuple(wide)))
    return space


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Draw a trial's value of each setting."""
    values: dict[str, Any] = {}
    for key, bounds in space.items():
        if bounds.choices:
            # As JSON: Optuna stores choices of scalar types only, and layer sizes are a list.
            values[key] = json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in bounds.choices]))
        elif isinstance(bounds.low, int) and isinstance(bounds.high, int):
            values[key] = trial.suggest_int(key, bounds.low, bounds.high, log=bounds.log)
        else:
            assert bounds.low is not None
            assert bounds.high is not None
            values[key] = trial.suggest_float(key, bounds.low, bounds.high, log=bounds.log)
    return values


def stored(values: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Values as Optuna stores them, to enqueue a trial."""
    return {key: json.dumps(value) if space[key].choices else value for key, value in values.items()}


def own_values(space: Space, recipe: Recipe) -> dict[str, Any]:
    """The recipe's own value of each setting; it is tried first, so that the best is no worse than the recipe."""
    values: dict[str, Any] = {}
    for key, bounds in space.items():
        value: Any = recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is None or not _contains(bounds, value):
            raise SpecError(f"tune: {key} is {value!r} in the recipe", "a range with this value, as it is tried first")
        values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _contains(bounds: TuneRange, value: Any) -> bool:
    if bounds.choices:
        return json.dumps(value) in [json.dumps(choice) for choice in bounds.choices]
    return bounds.low is not None and bounds.high is not None and bounds.low <= value <= bounds.high


def changes_of(values: Mapping[str, Any]) -> list[str]:
    """Values as --set changes."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
