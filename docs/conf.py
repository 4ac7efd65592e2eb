"""How Sphinx builds the site: ``make site``. The pages are the Markdown files of this folder."""

from __future__ import annotations

import re

project = "specgraph"
author = "the specgraph authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "specgraph"
html_copy_source = False
html_show_sphinx = False
copyright = ""  # the licence says it

myst_heading_anchors = 3  # so that links to headings work here as they do on GitHub
myst_enable_extensions = ["attrs_inline"]

# A class lists its members in the order of its file, and an attribute stands in the text of its class.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_use_rtype = False

_REPOSITORY = re.compile(r"\]\(\.\./(CONTRIBUTING)\.md")


def _links_to_pages(app: object, page: str, source: list[str]) -> None:
    """A link to a file of the repository that is a page here, too, leads to the page."""
    source[0] = _REPOSITORY.sub(lambda match: f"]({match[1].lower()}.md", source[0])


def _whole_sentence(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking what stands before the first colon of an attribute's text for its type."""
    if what in ("attribute", "property", "data"):
        lines.insert(0, "")


def setup(app) -> None:  # type: ignore[no-untyped-def]
    app.connect("source-read", _links_to_pages)
    app.connect("autodoc-process-docstring", _whole_sentence, priority=100)  # before napoleon
