"""Fault injection into small jobs (`rowwise drill`), and a self-test of the kernels (`rowwise doctor`)."""
