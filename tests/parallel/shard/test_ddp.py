"""Tables inside of torch's DistributedDataParallel: two ranks are one rank on the joined batch."""

import pytest
import torch
from parallel.shard import ddp_ranks

from rowwise.parallel.comm.spawn import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_two_ranks_are_one_on_the_joined_batch():
    net = ddp_ranks.Net()
    wanted = ddp_ranks.train(net, net)
    ranks = run_processes(2, ddp_ranks.run, timeout_s=60)
    means = [sum(losses) / 2 for losses in zip(*(losses for losses, _, _ in ranks), strict=True)]
    assert means == pytest.approx(wanted, abs=1e-5)
    for _, rows, layers in ranks:
        for tile, ours in rows:
            wanted_rows = net.embeddings.weights(tile.table)[slice(*tile.rows), slice(*tile.cols)]
            torch.testing.assert_close(ours, wanted_rows, rtol=1e-5, atol=1e-5)
        for ours, parameter in zip(layers, net.layers.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-4, atol=1e-5)


def test_rows_that_it_would_copy_are_refused():
    for whole, overwritten in run_processes(2, ddp_ranks.refused, timeout_s=60):
        assert whole.startswith("table 'a' in DistributedDataParallel on 2 ranks")
        assert whole.endswith("call shard(model, plan, comm) before DistributedDataParallel")
        assert overwritten.startswith("DistributedDataParallel has copied '0.embeddings.")
