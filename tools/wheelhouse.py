"""Write requirements.txt into a folder of wheels, each with its hash, to install them without an index.

    pip download '.[evidence]' -c constraints.txt -d wheelhouse
    python tools/wheelhouse.py wheelhouse
    pip install --no-index --find-links wheelhouse --require-hashes -r wheelhouse/requirements.txt

pip refuses a wheel whose hash is another one, and a package that has none.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile


def requirements(folder: Path) -> Iterator[str]:
    """Yield a line for each package: its name, its version and the hashes of its wheels."""
    found: dict[str, list[str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        with ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            said = HeaderParser().parsestr(archive.read(metadata).decode())
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        found.setdefault(f"{said['Name']}=={said['Version']}", []).append(f"--hash=sha256:{digest}")
    for package, hashes in sorted(found.items()):
        yield " \\\n    ".join([package, *hashes])


def main(folder: Path) -> None:
    """Write the file; refuse what pip would have to build, which needs an index."""
    if other := sorted(path.name for path in folder.glob("*.tar.gz")):
        sys.exit(f"{', '.join(other)}: no wheels; build them first (pip wheel --no-deps)")
    lines = list(requirements(folder))
    if not lines:
        sys.exit(f"there are no wheels in {folder}")
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")
    print(f"{folder / 'requirements.txt'}: {len(lines)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
