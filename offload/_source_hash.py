"""Names a state of the native sources, so that a module built from another state is noticed.

Standard library only: `setup.py` runs this file without importing the package.
"""

import hashlib
from pathlib import Path


def source_hash(csrc_directory: Path) -> str:
    """Hashes names and contents of the files directly in a directory.

    Args:
        csrc_directory: The directory of the native sources.

    Returns:
        The first 16 hex digits of a sha256 over the files, sorted by name.

    Raises:
        FileNotFoundError: The directory does not exist, as in an installed package.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(csrc_directory).iterdir(), key=lambda entry: entry.name):
        if not path.is_file() or path.name.startswith("."):
            continue
        contents = path.read_bytes()
        # Lengths make the boundary between a name and its contents unambiguous.
        digest.update(f"{len(path.name)} {path.name} {len(contents)}\n".encode())
        digest.update(contents)
    return digest.hexdigest()[:16]
