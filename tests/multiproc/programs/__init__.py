"""What the workers of a test run; each function takes a Job."""
