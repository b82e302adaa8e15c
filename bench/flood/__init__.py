"""A job amid a flood of unauthenticated connections."""
