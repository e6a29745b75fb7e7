"""Runs a model whose tables are cut into tiles, whoever made the plan."""
