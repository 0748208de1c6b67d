"""Sphinx builds the site from the markdown of this folder: `make docs`.

The pages are plain markdown, so that they also read well on a code host. The table of contents
follows from the list in index.md; a page that the list does not have comes last.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "verifiers_rl"
html_title = "verifiers_rl"
html_theme = "furo"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # anchors as code hosts make them


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to other markdown of the repository lead to the files, as links to code do. Add a
    hidden toctree for each part of index.md's list of pages.
    """
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])
    if name != "index":
        return
    parts = re.split(r"^## (.+)$", source[0], flags=re.MULTILINE)
    listed = set()
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        pages = re.findall(r"\]\((\w+)\.md\)", text)
        listed |= {*pages}
        source[0] += _toctree(title, pages)
    rest = {path.stem for path in HERE.glob("*.md")} - listed - {"index"}
    if rest:
        source[0] += _toctree("More", sorted(rest))


def _toctree(title: str, pages: list[str]) -> str:
    lines = ["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""]
    return "\n".join(lines)


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
