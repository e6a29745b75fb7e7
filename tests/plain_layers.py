"""Layers in plain torch, with the weights of ours: what models are compared with."""


def plain_linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def plain_mlp(mlp, x):
    for k, layer in enumerate(mlp.layers):
        x = plain_linear(layer, x)
        x = x.clamp(min=0) if k < mlp.hidden else x
    return x


def plain_norm(norm, x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias
