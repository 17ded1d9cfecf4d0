"""Where frozen parameters lie."""
