"""Python's part of the plan and of a push."""
