"""Steps of a compiled model on ranks that are processes."""

from clicks import make_clicks
from train.dense_ranks import make
from trainings import work_of

from rowwise.train.step import step


def losses(comm, parallel, name, compiled, steps=4):
    """Of steps of whole batches; in the last one both ranks have fewer samples, and one has none."""
    model, _ = make(comm, parallel, name)
    context = work_of(model, comm, dense_parallel=parallel, compile=compiled, batch=512)
    found = []
    for number in range(1, steps + 1):
        size = 256 if number < steps else 9 * (1 - comm.rank)
        found.append(step(context, [make_clicks(size, seed=100 * number + comm.rank)], number).loss)
    return found
