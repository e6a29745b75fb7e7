"""Tables of lakes as sources: a snapshot of a table is resolved to Parquet files, which `ParquetReader` reads."""
