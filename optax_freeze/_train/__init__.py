"""Whole training steps."""
