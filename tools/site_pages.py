"""A hook of mkdocs: pages of the repository that are not in docs/, and links between the two.

README.md, the other pages of OUTSIDE and the notebooks become pages of the site. A link to any other file of the
repository leads to it at `repo_url`, and is left out where there is none.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "checkpoints/README.md": "trained.md",
    "docs/first_steps.ipynb": "first_steps.md",
    "docs/memory_tricks.ipynb": "memory_tricks.md",
}
"""Files of the repository, and the pages that they become."""
SOURCES = {page: source for source, page in OUTSIDE.items()}
FIGURES = "benchmarks/figures"


def on_files(files: Any, config: Any) -> Any:
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=_cells(text) if source.endswith("ipynb") else text))
    for figure in (ROOT / FIGURES).glob("*.svg"):
        files.append(File.generated(config, f"{FIGURES}/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def link(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if not (ROOT / path).exists():
            return match[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        inside = path.startswith((FIGURES, "docs/"))
        if path not in OUTSIDE and not inside and not config.repo_url:
            return match[1]
        found = OUTSIDE.get(path) or (path.removeprefix("docs/") if inside else f"{config.repo_url}/{kind}/main/{path}")
        return f"[{match[1]}]({found}{match[3] or ''})"

    return re.sub(r"\[([^]]*)\]\(([\w./-]+)(#[\w-]+)?\)", link, markdown)


def _cells(notebook: str) -> str:
    """The page of a notebook: its texts, and its code as blocks."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)
