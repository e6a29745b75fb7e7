"""Answers requests for predictions: versions of a model, checks of requests, batches of what has arrived, HTTP."""
