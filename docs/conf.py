"""Sphinx configuration. The names of this library in text (``fz.freeze``) become links to their API pages."""

import importlib
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

project = "optax_freeze"
author = "the optax_freeze authors"
copyright = "2026, the optax_freeze authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = [".md"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "optax_freeze"
html_theme_options = {
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
MODULES = {
    "fz": "optax_freeze",
    "fnnx": "optax_freeze.nnx",
    "checkpoint": "optax_freeze.checkpoint",
    "optax_freeze.linen": "optax_freeze.linen",
}


class NamesAreLinks(SphinxTransform):
    """``fz.name`` and ``fz.name(...)``, as literals outside of headings and links, refer to their API pages."""

    default_priority = 5

    def apply(self, **kwargs):
        for literal in list(self.document.findall(nodes.literal)):
            name = re.match(rf"({'|'.join(MODULES)})\.(\w+)(\(|$)", literal.astext())
            plain = not isinstance(literal.parent, nodes.title | nodes.reference | addnodes.pending_xref)
            if name and plain and hasattr(importlib.import_module(MODULES[name[1]]), name[2]):
                target = f"{MODULES[name[1]]}.{name[2]}"
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
                )
                literal.replace_self(link)
                link += literal


class NoEmptyLastLine(SphinxTransform):
    """A doctest in Markdown ends with an empty line, which need not be shown."""

    default_priority = 5

    def apply(self, **kwargs):
        for block in list(self.document.findall(nodes.literal_block)):
            text = block.astext().rstrip("\n")
            block.replace_self(nodes.literal_block(text, text, **block.attributes))


def setup(app):
    app.add_transform(NamesAreLinks)
    app.add_transform(NoEmptyLastLine)
