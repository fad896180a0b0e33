"""The site: how Sphinx makes it of the pages in this folder and of the docstrings. `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import bd3lm

project = "bd3lm"
author = "bd3lm contributors"
copyright = author  # the name that Sphinx reads
version = release = bd3lm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "docstrings",
    "rooms",
    "mathml",
    "links",
    "notebooks",
]
exclude_patterns = ["_ext", "_static"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "markdown"}

# Markdown as GitHub reads it, its anchors too: a link to a heading that is not there is a warning.
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 5

# Signatures one argument a line where they are long; types by their last name.
maximum_signature_line_length = 88
python_display_short_literal_types = True
python_use_unqualified_type_names = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = "bd3lm"
html_favicon = "../src/bd3lm/serving/page/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1a5fb4", "color-brand-content": "#1a5fb4"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"},
}
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Prompts and what a program printed are not copied with the code.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight pre"

# A page of an included file stands elsewhere on the site than in the repository.
site_pages = {
    "../CONTRIBUTING.md": "project/contributing.md",
    "../CHANGELOG.md": "project/changelog.md",
    "../src/bd3lm/box/README.md": "project/box.md",
    "../research/results.md": "project/all-results.md",
    "../research/performance.md": "project/speed.md",
}
