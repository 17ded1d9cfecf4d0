"""Reading and changing optimizer states."""
