"""Recommendation models: plain modules over `Embeddings`, one a file. They know of no plans.

A model takes a `Batch`, or its dense numbers and ids, and returns logits. It may hold more than one `Embeddings`; each
needs its `update()` after a backward.
"""
