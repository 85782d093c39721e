"""The site: `make docs` builds it from these pages, without a network.

Links of a page to files outside of docs/ lead to copies of them in the site (`source/…`), so that
pages read the same here and in a repository's browser.
"""

import html
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from posixpath import normpath

from pygments.lexers import guess_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "src/nufed/__init__.py").read_text("utf-8"))

project = "nufed"
author = "nufed developers"
copyright = "nufed developers, Apache-2.0"
version = release = VERSION[1] if VERSION else ""
extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build", "results/*", "*.py"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4  # as a repository's browser names headings
myst_url_schemes = {"http": None, "https": None, "source": "{{path}}"}
myst_fence_as_directive = ["math"]

html_theme = "furo"
html_title = f"nufed {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_prompt_text = "$ "
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "class"

(mathjax,) = find_spec("sphinx-mathjax-offline").submodule_search_locations
html_static_path += [str(Path(mathjax) / "static/mathjax/tex-svg.js")]
mathjax_path = "tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "global"}}

MIRRORED = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}  # pages of the site
LINK = re.compile(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)([^)\s]+)(\))")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def setup(app):
    app.connect("source-read", links_to_files)
    app.connect("html-collect-pages", pages_of_files)


def links_to_files(app, docname, source):
    """Links to files outside of docs/ become links to their pages in the site."""
    if docname in MIRRORED:
        source[0] = (ROOT / MIRRORED[docname]).read_text("utf-8")
    parts = FENCED.split(source[0])
    parts[::2] = [LINK.sub(lambda link: rewritten(app, docname, link), part) for part in parts[::2]]
    source[0] = "".join(parts)


def rewritten(app, docname, link):
    path, hash_, anchor = link[2].partition("#")
    folder = "." if docname in MIRRORED else f"docs/{docname}/.."
    target = normpath(f"{folder}/{path}")
    up = "../" * docname.count("/")
    pages = {"README.md": "index.md"} | {file: f"{page}.md" for page, file in MIRRORED.items()}
    if target in pages:
        return f"{link[1]}{up}{pages[target]}{hash_}{anchor}{link[3]}"
    if target.startswith("docs/"):
        inside = target.removeprefix("docs/")
        return f"{link[1]}{up}{inside}{hash_}{anchor}{link[3]}"
    if not (ROOT / target).exists():
        raise ValueError(f"{docname}: {link[0]} is a link to a file that does not exist")
    files_linked(app).add(target)
    return f"{link[1]}source:{up}source/{target}.html{link[3]}"


def files_linked(app):
    """The files outside of docs/ that pages link to; kept with the environment of a build."""
    if not hasattr(app.env, "nufed_files"):
        app.env.nufed_files = set()
    return app.env.nufed_files


def pages_of_files(app):
    """A page for every linked file, and for every linked folder and the files in it."""
    todo, done = sorted(files_linked(app)), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        path = ROOT / name
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name != "__pycache__")
            names = [str(p.relative_to(ROOT)) for p in inside]
            todo += names
            links = (f'<li><a href="{path.name}/{p.name}.html">{p.name}</a></li>' for p in inside)
            body = f"<ul>{''.join(links)}</ul>"
        else:
            body = highlighted(app, path)
        title = html.escape(name)
        yield f"source/{name}", {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def highlighted(app, path):
    text = path.read_text("utf-8", errors="replace")
    try:
        lexer = guess_lexer_for_filename(path.name, text)
    except ClassNotFound:
        lexer = TextLexer()
    return app.builder.highlighter.highlight_block(
        text, lexer.aliases[0], linenos=False, force=True
    )
