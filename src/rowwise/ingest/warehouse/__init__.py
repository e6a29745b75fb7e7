"""Rows stored to train on: how files are laid out, written and read; what convert makes, and `ParquetReader` reads."""
