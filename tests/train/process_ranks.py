"""What processes run in `test_trainer_processes`: functions that they find by name."""

import os
import signal

import torch

from rowwise.base.errors import AgreedError, DataError


def run(comm, world, which=None):
    """A whole run, or the rest of one; which random numbers this rank has, and how far it came."""
    net = world.net()
    trainer = world.on(comm, net) if which is None else world.resumed(comm, net, which=which)
    seed = torch.initial_seed()
    return seed, str(trainer.run()).partition("time_s")[0], trainer.progress.finished


def stopped_by_a_signal(comm, world):
    """One rank gets it in the middle of its second step, after the header of the third has left."""
    trainer = world.on(comm, world.net())
    signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    if comm.rank == 1:
        trainer.job.model.register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGTERM) if trainer.progress.step == 1 else None
        )
    progress = trainer.run()
    return progress.step, progress.finished


def refused(comm, world):
    """What each rank says."""
    try:
        world.on(comm, world.net()).run()
    except (DataError, AgreedError) as error:
        return type(error).__name__, str(error)
    return None
