"""Sphinx configuration."""

project = "optax_freeze"
author = "the optax_freeze authors"
copyright = "2026, the optax_freeze authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = [".md"]
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
