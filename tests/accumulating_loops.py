"""Loops that accumulate gradients, with tables that a hook of the optimizer updates: prints the loss of each batch."""

import json
import sys

import torch
from torch import nn

from rowwise import Adam, Embeddings, Jagged, Table

BATCHES = [Jagged.from_lists({"t": [[k], [k, 8]]}) for k in range(4)]
EPOCHS, EACH = 2, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings([Table(name="t", rows=9, dim=4, optimizer=Adam(lr=0.1))])
        self.last = nn.Linear(4, 1)
        self.losses = []

    def forward(self, batch):
        loss = (self.last(self.embeddings(batch).values()) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def adam(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.embeddings.update())
        return optimizer


def own(net):
    optimizer = net.adam()
    for number, batch in enumerate(BATCHES * EPOCHS):
        (net(batch) / EACH).backward()
        if number % EACH == EACH - 1:
            optimizer.step()
            optimizer.zero_grad()


def accelerate(net):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EACH)
    model, optimizer = accelerator.prepare(net, net.adam())
    for batch in BATCHES * EPOCHS:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()


def lightning(net):
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def configure_optimizers(self):
            return net.adam()

        def training_step(self, batch, _index):
            return self.net(batch)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = torch.utils.data.DataLoader(BATCHES, batch_size=None)
    Trainer(accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=EACH, **quiet).fit(Module(), loader)


if __name__ == "__main__":
    torch.manual_seed(0)
    chosen = Net()
    globals()[sys.argv[1]](chosen)
    print(json.dumps(chosen.losses))
