"""Measures this machine's kernels and links, and learns what steps cost on it.

The only package beside `recipes` that may use both tensors and the planner: it runs what plans are made of, and trains
the models by which they are judged. What it makes is data, a hardware profile, which planning reads without it.
"""
