"""Starts the processes that a job needs in addition to its workers."""
