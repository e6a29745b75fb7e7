"""Training: from batches to a trained model, and what it takes to go on after a stop."""
