"""Warehouses, Parquet files laid out for training: `convert` writes them, `ParquetReader` reads them."""
