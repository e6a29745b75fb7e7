"""Run folders for tests, with the numbers that training would leave: losses that fall, phases, tables of many sizes."""

import csv
import json
import math
import random
from pathlib import Path

HOSTILE = "<script>alert('x')</script>\"&\x01\ud7ff"
PHASES = ("data_s", "lookup_s", "forward_s", "backward_s", "update_s", "other_s")
MEASURED = {
    "data": 0.1,
    "route": 0.001,
    "lookup": 0.004,
    "exchange": 0.002,
    "wait": 0.003,
    "forward": 0.01,
    "update": 0.006,
}
RECIPE = """\
# A small click model.
name: {name}
seed: {seed}
data:
  dataset: synthetic
  train_samples: {samples}
  batch: 2048
model:
  kind: dlrm
  dense_layers: [512, 256, 64]   # from the dense features
  top_layers: [512, 256]
tables:
- name: user
  rows: 1000000
  dim: {dim}
  optimizer: {{kind: rowwise_adagrad, lr: {lr}}}
- name: item
  rows: 200000
  dim: {dim}
"""


def make(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = 400,
    tables: int = 3,
    tasks: tuple[str, ...] = ("click",),
    extra: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    status: str | None = "finished",
    lr: float = 0.05,
) -> Path:
    """Write a whole run folder; without a status it was killed."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    recipe = RECIPE.format(name=folder.parent.name, seed=seed, samples=steps * 40960, dim=16 + 16 * (seed % 2), lr=lr)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "env.json").write_text(json.dumps(environment(seed), indent=2))
    finals = write_metrics(folder / "metrics.csv", steps, tasks, extra, noise, lr)
    write_steps(folder / "steps.csv", steps, noise, 1 + 0.2 * seed)
    write_tables(folder / "tables.csv", tables, names, noise)
    write_slices(folder / "slices.csv", tasks, names, noise)
    warned = "table user: 0.3 % of ids were outside the table and were mapped to its last row\n"
    (folder / "warnings.txt").write_text(warned if seed == 0 else "")
    if status:
        (folder / "result.json").write_text(json.dumps(result(folder, status, steps, tasks, finals), indent=2))
    return folder


def environment(seed):
    return {
        "rowwise": "0.1.0",
        "torch": f"2.1{1 + seed % 3}.0",
        "python": "3.11.9",
        "cpu": "AMD EPYC 9R14",
        "cores": 2,
        "memory_bytes": 16_000_000_000,
        "commit": "4f2a9c1",
        "isa": ["avx2", "avx512"],
        "platform": "Linux-6.1-x86_64",
    }


def put(path, head, rows):
    """A CSV file of these rows, below the names of their columns."""
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([head, *([str(cell).replace("\r", "") for cell in row] for row in rows)])


def write_metrics(path, steps, tasks, extra, noise, lr):
    finals, rows = {}, []
    for step in range(1, steps + 1):
        splits = ["train", "lifetime"] + (["valid"] if step % max(1, steps // 12) == 0 else [])
        for split in splits + (["test"] if step == steps else []):
            for k, task in enumerate(tasks):
                for name, value in values(step / steps, split, k, extra, noise, lr).items():
                    rows.append([step * 20, step * 40960, step * 1.7, split, task, name, value])
                    finals[task, name] = value
    put(path, ["step", "samples", "time_s", "split", "task", "metric", "value"], rows)
    return finals


def values(at, split, k, extra, noise, lr):
    wobble = {"train": 0.012, "lifetime": 0.0004, "valid": 0.001, "test": 0.0005}[split] * noise.gauss(0, 1)
    learnt = 1 - math.exp(-6 * at * (lr / 0.05) ** 0.5)
    over = 0.01 * max(0, at - 0.75) * (split in ("valid", "test"))
    ne = 1.05 - 0.24 * learnt - 0.05 * k + wobble + over + (2.0 * math.exp(-at * 400) if split == "train" else 0)
    rate = 0.256 - 0.2 * k
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    found = {
        "loss": ne * entropy,
        "ne": ne,
        "auc": 0.5 + 0.29 * learnt + 0.02 * k - wobble - over,
        "calibration": 1 + 0.3 * math.exp(-at * 30) + 3 * wobble,
        "base_rate": rate + wobble / 10,
        "count": {"train": 40960, "lifetime": int(at * 16e6), "valid": 200_000, "test": 400_000}[split],
    }
    return found | {name: 0.3 * learnt + wobble for name in extra if split in ("valid", "test")}


def write_steps(path, steps, noise, speed):
    rows, spent = [], 0.0
    for step in range(1, steps + 1):
        stall = 3.0 if noise.random() < 0.01 else 1.0
        parts = [w * (1 + 0.1 * noise.random()) / speed for w in (0.11 * stall, 0.33, 0.28, 0.52, 0.39, 0.05)]
        spent += sum(parts)
        memory = 1.9e9 + 2.2e8 * min(1, step / steps * 8) + 1e6 * noise.random()
        rate = 0.001 * min(1, step / (0.05 * steps))
        norm = 0.4 + 1 / (1 + step / 20) + 0.1 * noise.random()
        row = [step * 20, step * 40960, f"{spent:.3f}", f"{40960 / sum(parts):.1f}", *(f"{p:.4f}" for p in parts)]
        rows.append([*row, int(memory), rate, f"{norm:.5f}"])
    put(path, ["step", "samples", "time_s", "samples_s", *PHASES, "memory_bytes", "rate", "gradient_norm"], rows)


def write_stages(folder, ranks=2, lines=5, predicted=True, batch=2048, first=1, slow=1.0):
    """What each rank took, and the plan whose forecast it is beside; each line takes one percent longer."""
    expected = {"lookup": (0.002, 0.003), "exchange": (0.004, 0.0035), "wait": (0.001, 0.0), "update": (0.005, 0.0025)}
    stages = {name: [took[rank % 2] for rank in range(ranks)] for name, took in expected.items()}
    facts = {"model": "networks learned on here", "batch": batch, "step_s": 0.01, "stages_s": stages}
    plan = {"world": ranks, "tiles": []} | ({"forecast": facts} if predicted else {})
    (folder / "plan.json").write_text(json.dumps(plan))
    path, new = folder / "stages.csv", not (folder / "stages.csv").exists()
    with path.open("a", newline="") as file:
        out = csv.writer(file)
        if new:
            out.writerow(["step", "rank", "phase", "measured_s", "predicted_s"])
        for line in range(first, first + lines):
            for rank in range(ranks):
                for phase in MEASURED:
                    told = stages[phase][rank] if predicted and phase in stages else ""
                    took = slow * MEASURED[phase] * (1 + rank) * (1 + line / 100)
                    out.writerow([line * 20, rank, phase, took, told])


def write_tables(path, tables, names, noise):
    columns = "table,rows,dim,row_type,optimizer,features,bytes,state_bytes"
    columns += ",ids_per_sample,unique_share,top_share,traffic_bytes"
    lines = []
    for k in range(tables):
        name = names[k] if k < len(names) else ("user", "item", "category")[k] if k < 3 else f"feature_{k:02}"
        rows, dim = int(10 ** (noise.random() * 5 + 2)), 16 * (1 + noise.randrange(4))
        ids = 1 + noise.randrange(30) * (noise.random() < 0.3)
        kind = noise.choice(["fp32", "fp16", "int8"])
        width = {"fp32": 4 * dim, "fp16": 2 * dim, "int8": dim + 8}[kind]
        features = f"{name}_clicked {name}_seen" if k % 4 == 1 else name
        facts = [name, rows, dim, kind, noise.choice(["rowwise_adagrad", "adam"]), features, rows * width, rows * 4]
        lines.append([*facts, ids, round(noise.random(), 4), round(noise.random(), 4), ids * width])
    put(path, columns.split(","), lines)


def write_slices(path, tasks, names, noise):
    rows = []
    for task in tasks:
        for feature in ("device", "country", *names):
            for value in ("phone", "desktop", "tablet", "tv", "3", "other"):
                ne = 0.8 + 0.3 * noise.random()
                size = int(400_000 / (1 + 9 * noise.random()))
                facts = [0.25 * noise.random() + 0.05, 0.45, ne, 1.2 - ne / 2, 0.0004, 0.9 + 0.2 * noise.random()]
                rows.append(["test", feature, value, task, size, *facts])
    columns = "split,feature,value,task,count,base_rate,loss,ne,auc,auc_bound,calibration"
    put(path, columns.split(","), rows)


def result(folder, status, steps, tasks, finals):
    names = ("loss", "ne", "auc", "calibration", "base_rate", "count")
    at = max(1, steps // 12) * 9
    return {
        "status": status,
        "message": None if status == "finished" else "loss was nan at step 7,980; lower the learning rate",
        "recipe": folder.parent.name,
        "steps": steps * 20,
        "samples": steps * 40960,
        "epochs": 2.0,
        "wall_s": steps * 1.71,
        "samples_s": 24_095.0,
        "peak_memory_bytes": 2_140_000_000,
        "best": {"step": at * 20, "split": "valid", "task": tasks[0], "metric": "ne", "value": 0.8133},
        "test": {task: {name: finals[task, name] for name in names} for task in tasks},
        "ceiling": {tasks[0]: {"auc": 0.8021, "ne": 0.7901}},
    }
