"""Measures how fast rows are prepared here, and which part is slowest: `rowwise data bench`.

`measure` does what a worker of `ingest.service` and a trainer do, in this process; `packed` takes apart what cannot be
seen from outside; `verdict` is pure and says what the numbers mean.
"""
