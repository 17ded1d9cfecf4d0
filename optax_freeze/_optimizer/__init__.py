"""Gradient transformations."""
