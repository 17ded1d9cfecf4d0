"""Sphinx configuration.

Names in text become links: ``fz.freeze`` to its place in the API, ``optax.adamw`` and ``jax.grad`` to the pages of
these projects. The addresses of the latter are in ``docs/inventories``, so that a build needs no network.

Pages with code cells are executed once for each state of the package and the examples, which the cells import.
"""

import ast
import hashlib
import importlib
import inspect
import os
import pathlib
import re
import textwrap

from docutils import nodes
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform

HERE = pathlib.Path(__file__).parent

project = "optax_freeze"
author = "the optax_freeze authors"
copyright = "2026, the optax_freeze authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "development.md", "changelog.md"]
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
autodoc_typehints = "signature"  # of properties; those of functions are types_as_written
autodoc_member_order = "bysource"
napoleon_attr_annotations = False  # the signature of a class has the types of its attributes
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"
SOURCES = sorted([*HERE.parent.glob("examples/*.py"), *HERE.parent.glob("optax_freeze/**/*.py")])
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
nb_execution_cache_path = str(HERE.parent / ".venv" / "notebooks" / STATE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "examples"), os.getenv("PYTHONPATH")]))
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest", str(HERE / "inventories" / "jax.txt")),
    "optax": ("https://optax.readthedocs.io/en/latest", str(HERE / "inventories" / "optax.txt")),
}

MODULES = {
    "fz": "optax_freeze",
    "fz.typing": "optax_freeze.typing",
    "fnnx": "optax_freeze.nnx",
    "checkpoint": "optax_freeze.checkpoint",
    "features": "optax_freeze.features",
    "linen": "optax_freeze.linen",
    "patch": "optax_freeze.patch",
    "optax_freeze.linen": "optax_freeze.linen",
}
OTHERS = {name.split()[0] for path in HERE.glob("inventories/*.txt") for name in path.read_text().splitlines()[3:]}
INTERNAL = {
    "Tied": "Literal['error', 'ignore']",
    "Stats": "Literal['frozen', 'live']",
    "Elements": "ElementMask",
    "Condition": "Callable[..., jax.Array]",
    "Converged": "Callable[..., jax.Array]",
    "ExtraArgs": "Mapping[str, Any] | Callable[[PyTree, PyTree], Mapping[str, Any]] | None",
    "Kind": "Literal['moved', 'changed', 'state', 'untrained']",
    "_Module": "Module",
    "GradientExplanation": "Explanation",
    "CutExplanation": "Explanation",
    "Leak": "NamedTuple",
    "Row": "NamedTuple",
    "Tree": "Params",
}
SPEC = ("specs", "all-forms-of-a-spec")


class NamesAreLinks(SphinxTransform):
    """``fz.name`` and ``fz.name(...)``, as literals outside of headings and links, refer to their API pages."""

    default_priority = 5

    def apply(self, **kwargs):
        for literal in list(self.document.findall(nodes.literal)):
            plain = not isinstance(literal.parent, nodes.title | nodes.reference | addnodes.pending_xref)
            target = self.target(literal.astext())
            if plain and target:
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
                )
                literal.replace_self(link)
                link += literal

    def target(self, text):
        """What a literal names: one of our functions, or one of JAX or Optax."""
        if name := re.match(rf"({'|'.join(map(re.escape, MODULES))})\.(\w+)(\(|$)", text):
            module = importlib.import_module(MODULES[name[1]])
            return f"{MODULES[name[1]]}.{name[2]}" if hasattr(module, name[2]) else None
        name = re.match(r"((?:jax|optax)[\w.]*)(\(|$)", text)
        return name[1] if name and name[1] in OTHERS else None


class FilesOutsideAreDownloads(SphinxTransform):
    """A link to a Markdown file that is not a page, such as ``../tests/optimizer_matrix.md``, leads to a copy of it."""

    default_priority = 5

    def apply(self, **kwargs):
        for link in list(self.document.findall(addnodes.pending_xref)):
            file = HERE / f"{link['reftarget']}.md"
            if link.get("refdomain") == "doc" and link["reftarget"] not in self.env.found_docs and file.exists():
                target = os.path.relpath(file, HERE)
                link.replace_self(
                    addnodes.download_reference("", "", *link.children, reftarget=target, refexplicit=True)
                )


class NoEmptyLastLine(SphinxTransform):
    """A doctest in Markdown ends with an empty line, which need not be shown."""

    default_priority = 5

    def apply(self, **kwargs):
        for block in list(self.document.findall(nodes.literal_block)):
            text = block.astext().rstrip("\n")
            block.replace_self(nodes.literal_block(text, text, **block.attributes))


def describe_what_is_listed(app, docname, source):
    """Below a table of the API stand the docstrings of its names, unless the page has a directive for them."""

    def with_docstrings(table):
        lines = []
        for room, name in re.findall(r"^`(\w+)\.(\w+)`", table[0], re.MULTILINE):
            full, value = f"{MODULES[room]}.{name}", getattr(importlib.import_module(MODULES[room]), name)
            if f":: {full}\n" not in page:
                lines.append(f".. auto{'class' if inspect.isclass(value) else 'function'}:: {full}\n")
        return "".join([table[0], "\n```{eval-rst}\n", *lines, "```\n"])

    page = source[0]
    if docname == "api":
        source[0] = re.sub(r"(?:^`\w+\.\w+` \| .*\n)+", with_docstrings, page, flags=re.MULTILINE)


def types_as_written(app, what, name, value, options, signature, returns):
    """The signature with its types as the source has them: ``frozen: Spec``, and not what that stands for."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if isinstance(definition, ast.ClassDef):
        arguments = of_class(definition)
        return None if arguments == "()" else (arguments, None)
    if not isinstance(definition, ast.FunctionDef):
        return None
    return of_function(definition), in_words(definition.returns) if definition.returns else None


def of_function(function):
    """The arguments of a function, without the instance of a method."""
    for arguments in (function.args.posonlyargs, function.args.args):
        if arguments and arguments[0].arg in ("self", "cls"):
            del arguments[0]
    return f"({in_words(function.args)})"


def of_class(definition):
    """The arguments of a class: those of its ``__init__``, or the fields of a dataclass or named tuple."""
    body = definition.body
    if made := [each for each in body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")]:
        return of_function(made[0])
    fields = [
        each for each in body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
    ]
    public = [field for field in fields if not ast.unparse(field.target).startswith("_")]
    return f"({', '.join(map(in_words, public))})"


def in_words(node):
    """The source text, without internal names of types."""
    text = node if isinstance(node, str) else ast.unparse(node)
    return re.sub(rf"\b({'|'.join(INTERNAL)})\b", lambda name: INTERNAL[name[1]], text)


def link_a_type(app, env, node, contnode):
    """Types in signatures, by their names in the source."""
    target = node.get("reftarget", "").rpartition(".")[2]
    if target in ("Spec", "Selector", "ElementMask", "PyTree"):
        reference = f"optax_freeze.typing.{target}"
        return app.env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, "obj", reference, addnodes.pending_xref("", reftype="obj"), contnode
        )
    return None


class Signatures(SphinxTransform):
    """The argument ``frozen`` leads to the forms of a spec, and private modules are not named."""

    default_priority = 500

    def apply(self, **kwargs):
        page, anchor = SPEC
        path = "../" * self.env.docname.count("/") + page
        for parameter in list(self.document.findall(addnodes.desc_parameter)):
            first = next(iter(parameter.findall(addnodes.desc_sig_name)), None)
            if first is not None and first.astext() == "frozen" and parameter.astext() != "frozen: int":
                link = nodes.reference("", "", internal=True, refuri=f"{path}.html#{anchor}")
                link += nodes.Text("frozen")
                first.clear()
                first += link
        for module in list(self.document.findall(addnodes.desc_addname)):
            if module.astext().startswith("optax_freeze._"):
                module.parent.remove(module)


def without_overloads(analyze):
    """Sphinx would list the overloads, for type checkers, in place of the signature."""

    def analyze_and_forget(self):
        analyze(self)
        self.overloads = {}

    return analyze_and_forget


def break_names(app, pagename, templatename, context, doctree):
    """Names in the contents of a page may go on in the next line behind an underscore."""
    context["toc"] = re.sub(r">[^<]+", lambda text: text[0].replace("_", "_<wbr>"), context.get("toc", ""))


def setup(app):
    ModuleAnalyzer.analyze = without_overloads(ModuleAnalyzer.analyze)
    app.add_transform(NamesAreLinks)
    app.add_transform(FilesOutsideAreDownloads)
    app.add_transform(NoEmptyLastLine)
    app.add_transform(Signatures)
    app.connect("source-read", describe_what_is_listed)
    app.connect("autodoc-process-signature", types_as_written)
    app.connect("missing-reference", link_a_type)
    app.connect("html-page-context", break_names, priority=400)  # before the theme reads it
