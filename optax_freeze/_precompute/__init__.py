"""What is computed once for each batch, and not in every epoch."""
