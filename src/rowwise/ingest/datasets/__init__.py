"""Datasets ready to train on, each a reader, what its columns are, and tables to begin with; `catalog` has them all."""
