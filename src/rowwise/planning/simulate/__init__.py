"""What a step takes on a machine that is not here: our step as stages, and sweeps over machines and settings."""
