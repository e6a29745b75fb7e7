"""Measures the throughput of row preparation on this machine, and its bottleneck: `rowwise data bench`.

`measure` runs the work of a worker of `ingest.service` and of a trainer in this process; `packed` separates
decompression from decoding; `verdict` is pure and interprets the numbers.
"""
