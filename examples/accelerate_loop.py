"""rowwise's tables and batches in a loop of Hugging Face accelerate, on one rank or several.

    python examples/accelerate_loop.py [--rows 200000] [--epochs 2] [--resume FOLDER]
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py

The backward updates the tables, so the loop stays as it is. On several ranks each has some tiles of the tables, and
accelerate's DistributedDataParallel has the other layers. `save_state` saves tables and their optimizer state in a
folder of their own, which any number of ranks can load.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: idle threads leave the cores alone

import msgspec
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from rowwise import DLRM, Embeddings
from rowwise.checkpoint.of_tables import load_tables, save_tables
from rowwise.ingest import Batcher, Batching, BatchShard, Position
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.parallel.comm import connect
from rowwise.parallel.shard import shard
from rowwise.planning.planner import simple_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--resume", type=Path, help="a folder that this program has saved")
    options = parser.parse_args()
    torch.manual_seed(0)

    accelerator, comm, data = Accelerator(cpu=True), None, synthetic(options.rows)
    embeddings = Embeddings(data.tables, update_in_backward=True)  # tables carry their own optimizers
    model = DLRM(embeddings, len(data.columns.dense), bottom=(64, 16), top=(64, 1))
    if accelerator.num_processes > 1:
        comm = connect()
        # Of the module that DistributedDataParallel wraps, so that it leaves the rows alone.
        shard(model, simple_plan(data.tables, comm.topology), comm)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = accelerator.unwrap_model(model)

    def save(_models, states, folder):
        for state in states:
            for name in [name for name in state if "embeddings." in name]:
                del state[name]  # each rank has only its tiles
        save_tables(plain, Path(folder) / "tables", comm)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda _models, folder: load_tables(plain, Path(folder) / "tables"))
    position = None
    if options.resume:
        accelerator.load_state(options.resume, strict=False)  # the state dict has no tables
        position = msgspec.json.decode((options.resume / "position.json").read_bytes(), type=Position)

    part = BatchShard(rank=accelerator.process_index, world=accelerator.num_processes)
    batching = Batching(size=2048, ahead=2, shard=part)
    batches = Batcher(data.train, data.columns, data.tables, batching, position)
    while (epoch := batches.state().epoch) < options.epochs:
        for batch in batches:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels_BK)
            accelerator.backward(loss)  # each touched row changes once, in place
            optimizer.step()
        accelerator.print(f"epoch {epoch}: last loss {accelerator.reduce(loss.detach(), 'mean').item()}")

    accelerator.save_state(options.folder)
    if accelerator.is_main_process:
        (options.folder / "position.json").write_bytes(msgspec.json.encode(batches.state()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
