"""Measures this machine's kernels and links, and fits a hardware profile to the measurements.

The only package beside `recipes` that may use both torch and the planner: it runs the operators of plans, and trains
the cost models that rate them. Planning reads the profile, which is data.
"""
