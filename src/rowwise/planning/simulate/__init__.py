"""Seconds of a step on another machine: our step as stages, and sweeps over machines and settings."""
