"""Fault injection into small jobs (`rowwise drill`), and the self-test of the kernels (`rowwise doctor`)."""
