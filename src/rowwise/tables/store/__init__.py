"""Rows in tiers of memory: tables on disk behind a cache of rows, streams of rows, and how well caches do."""
