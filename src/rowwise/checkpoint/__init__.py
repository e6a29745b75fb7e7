"""Checkpoints are ordinary files: safetensors with named tensors in chunks, and a JSON manifest that lists them."""
