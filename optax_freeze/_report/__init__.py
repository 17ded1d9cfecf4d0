"""What is frozen, and what that saves."""
