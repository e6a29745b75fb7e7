"""Recommendation models: plain modules over `Embeddings`, one a file. They know of no ranks and no plans."""
