"""Checkpoints are ordinary files: safetensors with named tensors in pieces, and a JSON manifest that lists them."""
