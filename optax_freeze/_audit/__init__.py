"""Where an optimizer does not freeze what it should."""
