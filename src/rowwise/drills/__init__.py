"""What is tried on purpose: faults of small jobs (`rowwise drill`), and the kernels of a machine (`rowwise doctor`)."""
