"""Training: what is measured along the way, and what it takes to go on after a stop."""
