"""The loss as a function of the trainable parameters."""
