"""Steps of a compiled model on ranks that are processes."""

from clicks import make_clicks
from train.dense_ranks import make

from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import Training
from rowwise.train.step import StepContext, step


def losses(comm, parallel, name, compiled, steps=4):
    """Of steps of whole batches; in the last one both ranks have fewer samples, and one has none."""
    model, _ = make(comm, parallel, name)
    settings = Training(dense_parallel=parallel, compile=compiled, batch=512)
    context = StepContext.create(model, Clicks(model), settings, Breakdown(), comm)
    found = []
    for number in range(1, steps + 1):
        size = 256 if number < steps else 9 * (1 - comm.rank)
        found.append(step(context, [make_clicks(size, seed=100 * number + comm.rank)], number).loss)
    return found
