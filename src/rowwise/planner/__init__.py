"""Decides where tables live: specifications in, a `Plan` out. Pure, and without any tensor library."""
