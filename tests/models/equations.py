"""A model of bags against its equations, which a function in plain torch computes sample by sample."""

import torch


def check_equations(model, batch, samples, plain, tasks):
    """The logits, and the gradients of its layers, are those of `plain(model, sample, dense_F, rows)`."""
    parameters = list(model.top.parameters()) + list(model.attention.parameters())
    rows = {name: model.embeddings.table(name).clone() for name in ("item", "brand", "user")}
    expected = torch.stack([plain(model, s, x, rows) for s, x in zip(samples, batch.dense_BF, strict=True)])
    grad = torch.randn(len(samples), tasks)
    wanted = torch.autograd.grad((expected * grad).sum(), parameters, allow_unused=True)
    logits = model(batch)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad((logits * grad).sum(), parameters)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-3, atol=1e-5)
