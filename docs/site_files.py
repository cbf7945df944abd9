"""Hook of MkDocs: the site has the documents of the whole repository, at their paths.

Links between documents are relative paths, in the repository and on the site alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md",
    "LICENSE",
    "docs/*.md",
    "deploy/*",
    "dashboards/*",
    "benchmarks/README.md",
    "benchmarks/results/*",
)


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of ``docs/`` by those of the repository; files of the theme stay."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                place = path.relative_to(ROOT).as_posix()
                files.append(File(place, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
