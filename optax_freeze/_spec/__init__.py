"""Resolves a spec for given parameters: which elements of each leaf are frozen."""
