"""Rows in tiers of memory: the policies of the row cache, how well it does on given accesses, and what it takes."""
