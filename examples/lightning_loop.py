"""rowwise's tables and batches in a model of PyTorch Lightning, on one rank or several.

    python examples/lightning_loop.py [--rows 200000] [--epochs 2] [--devices 2] [--resume FOLDER/FILE.ckpt]

The backward updates the tables, so Lightning's loop stays as it is. On several ranks each has some tiles of the tables,
and Lightning's DistributedDataParallel has the other layers. Tables and their optimizer state are saved in a folder
beside Lightning's checkpoint, which any number of ranks can load.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: idle threads leave the cores alone

import lightning
import torch
from msgspec import structs
from torch.nn import functional as F

from rowwise import DLRM, Embeddings
from rowwise.checkpoint.of_tables import load_tables, save_tables
from rowwise.ingest import Batcher, Batching, BatchShard, Position
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.parallel.comm import connect
from rowwise.parallel.shard import shard
from rowwise.planning.planner import simple_plan

TABLES = "model.embeddings."  # prefix of the tables in the state dict


class Clicks(lightning.LightningModule):
    def __init__(self, rows: int):
        super().__init__()
        self.data, self.comm = synthetic(rows), None
        embeddings = Embeddings(self.data.tables, update_in_backward=True)  # tables carry their own optimizers
        self.model = DLRM(embeddings, len(self.data.columns.dense), bottom=(64, 16), top=(64, 1))
        self.strict_loading = False  # Lightning's state dict has no tables
        self.position, self.saved_step = None, None

    def configure_model(self):
        if self.trainer.world_size > 1 and self.comm is None:
            self.comm = connect()
            # Of the module that DistributedDataParallel wraps, so that it leaves the rows alone.
            shard(self, simple_plan(self.data.tables, self.comm.topology), self.comm)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=2e-3)

    def train_dataloader(self):
        part = BatchShard(rank=self.trainer.global_rank, world=self.trainer.world_size)
        batching = Batching(size=2048, ahead=2, shard=part)
        self.batches = Batcher(self.data.train, self.data.columns, self.data.tables, batching, self.position)
        return self.batches

    def training_step(self, batch, _index):
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.labels_BK)
        self.log("loss", loss, sync_dist=True, batch_size=len(batch.labels_BK))
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: last loss {self.trainer.callback_metrics['loss'].item()}")

    def on_save_checkpoint(self, checkpoint):
        folder = Path(self.trainer.default_root_dir) / f"tables-{self.global_step}"
        if self.global_step != self.saved_step:  # Lightning may save a step twice
            save_tables(self, folder, self.comm)
            self.saved_step = self.global_step
        dense = {name: x for name, x in checkpoint["state_dict"].items() if not name.startswith(TABLES)}
        position = structs.asdict(self.batches.state())  # the start of an epoch: Lightning reads one batch ahead
        checkpoint.update(tables=str(folder), position=position, state_dict=dense)

    def on_load_checkpoint(self, checkpoint):
        load_tables(self, Path(checkpoint["tables"]))
        self.position = Position(**checkpoint["position"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", type=Path, help="a checkpoint of this program")
    options = parser.parse_args()
    torch.manual_seed(0)

    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        default_root_dir=options.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Clicks(options.rows), ckpt_path=options.resume)
    trainer.save_checkpoint(options.folder / "last.ckpt")


if __name__ == "__main__":
    main()
