"""Check a release tag such as ``accel-ckpt-v0.1.0`` and print its package and version for the workflow.

The tag must name a package of ``packages/``, its version must be the one in ``__about__.py``, the changelog
must have a section for it, and no fragment may be left in ``changelog.d/``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def parse(tag: str, root: Path) -> tuple[str, str]:
    """Package and version of a tag.

    Raises:
        ValueError: the tag does not release what is in the repository; says what to do.
    """
    match = re.fullmatch(r"(accel-[a-z]+)-v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    if match is None:
        raise ValueError(f"tag {tag!r} is not <package>-v<version>, for example accel-ckpt-v0.1.0")
    package, version = match.groups()
    folder = root / "packages" / package
    if not folder.is_dir():
        raise ValueError(f"tag {tag!r} names {package}, which is not in packages/")
    about = (folder / "src" / package.replace("-", "_") / "__about__.py").read_text(encoding="utf-8")
    stated = re.search(r'__version__ = "([^"]+)"', about)
    if stated is None or stated[1] != version:
        raise ValueError(
            f"tag {tag!r} releases {version}, __about__.py says {stated and stated[1]}; change one of them"
        )
    left = sorted(path.name for path in (folder / "changelog.d").glob("*.md"))
    if left:
        raise ValueError(f"changelog fragments are left: {left}; run hatch run release-notes {folder}")
    if f"## {version} " not in (folder / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ValueError(f"CHANGELOG.md of {package} has no section for {version}")
    return package, version


if __name__ == "__main__":
    try:
        found_package, found_version = parse(sys.argv[1], Path())
    except ValueError as error:
        sys.exit(str(error))
    print(f"package={found_package}")
    print(f"version={found_version}")
