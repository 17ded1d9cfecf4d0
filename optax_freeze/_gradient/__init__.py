"""Gradients with respect to the trainable parameters only."""
