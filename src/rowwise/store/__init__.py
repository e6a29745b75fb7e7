"""Stores of rows in tiers of memory, and the interface by which rows of any tier are read and written."""
