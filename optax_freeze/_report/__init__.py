"""Summaries of what is frozen and what this saves."""
