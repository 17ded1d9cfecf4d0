"""Computing the output of frozen layers once for each batch instead of in every epoch."""
