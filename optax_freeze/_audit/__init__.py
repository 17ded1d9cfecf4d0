"""Finds leaks in an optimizer or a training step: places where it does not freeze what it should."""
