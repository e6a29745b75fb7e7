"""Managed tables: any 64-bit ids in a fixed number of rows."""
