"""How Sphinx makes the site: `make docs`. The source directory is the root of the repository."""

import re
import sys

import jaxcomm

project = "jaxcomm"
author = "the authors of jaxcomm"
copyright = author
release = jaxcomm.__version__

root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["benchmarks/results/gpu_overlap.md"]
exclude_patterns = [".*", "configs", "jaxcomm", "tests", "train", "workdir", "build"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "sphinx_book_theme"
html_title = "jaxcomm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the search is in the sidebar
    "show_toc_level": 2,
}
templates_path = ["_templates"]

# Tests run the notebooks; here are their stored outputs.
nb_execution_mode = "off"
myst_heading_anchors = 4  # links to headings, as on the pages of repositories
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"  # docstrings write `x` for code
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Wire", "Differs from the paper"]
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# The types of signatures are those of other libraries, and private ones.
nitpick_ignore_regex = [("py:class", ".*")]

# `jaxcomm.algorithms` and `jaxcomm.sparse` are names for modules of `jaxcomm.collectives`.
sys.modules["jaxcomm.algorithms"] = jaxcomm.algorithms
sys.modules["jaxcomm.sparse"] = jaxcomm.sparse


def _as_rst(app, what, name, obj, options, lines):
    """What our docstrings have that reStructuredText reads otherwise."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        # Napoleon takes the words before a colon for a type.
        line = re.sub(r"^:returns: \*?(.*?)\*? -- ", r":returns: \1: ", line)
        line = re.sub(r"(?<![\w`])`(?=\S)([^`]*[^`\s])`(?=\w)", r"``\1``\\ ", line)  # `Array`s
        lines[i] = re.sub(r"(?<![\\*])\*(?=[^\s*])", r"\\*", line)  # layers/*
    for line, (i, below) in zip(lines, enumerate(lines[2:]), strict=False):
        deeper = len(below) - len(below.lstrip()) > len(line) - len(line.lstrip())
        if re.search(r"[^:]:$", line) and not lines[i + 1].strip() and below and deeper:
            lines[i] += ":"  # an indented block is code


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _as_rst, priority=600)  # after napoleon
