"""What is frozen: a spec meets its parameters, and every leaf has one answer."""
