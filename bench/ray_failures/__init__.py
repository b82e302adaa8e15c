"""Failures of jobs under Ray, scripted by rank, incarnation and step."""
