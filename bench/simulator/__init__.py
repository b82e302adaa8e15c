"""Predicts how long a push-pull takes on links that need not exist."""
