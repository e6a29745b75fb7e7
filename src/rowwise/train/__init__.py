"""Training: what is measured along the way."""
