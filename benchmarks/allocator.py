"""Find a memory allocator's library to preload. Plain is fastest with an allocator that keeps its pages."""

import glob
import sys
from pathlib import Path

FOLDERS = ("/usr/lib/*", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib", f"{sys.prefix}/lib")


def find(name: str) -> str:
    """Return the path of the library called `name`, such as "tcmalloc". A path is returned as it is.

    Returns "" for "system" and "", which preload nothing.
    """
    if not name or name == "system":
        return ""
    if "/" in name:
        if not Path(name).is_file():
            raise ValueError(f"no file at {name}: --allocator takes a name such as tcmalloc, or the path of a library")
        return name
    paths = [path for folder in FOLDERS for path in glob.glob(f"{folder}/lib{name}*.so*") if "debug" not in path]
    if not paths:
        raise ValueError(
            f"no lib{name}*.so in {', '.join(FOLDERS)}: install it (Debian and Ubuntu: apt-get install "
            f"libtcmalloc-minimal4, or libjemalloc2) or give its path, --allocator /where/it/is/lib{name}.so"
        )
    return min(paths, key=len)
