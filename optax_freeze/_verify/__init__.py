"""Whether frozen bits moved."""
