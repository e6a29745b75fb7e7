"""Embedding tables on one device: specifications, batches, operators, stores of rows, id maps."""
