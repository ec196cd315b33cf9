"""The bill of materials: every installed package that Trilemma needs, by CycloneDX's own library."""

from __future__ import annotations

import importlib.metadata
import re
import uuid
from collections.abc import Iterator

from trilemma.base.errors import UserError

SBOM = "sbom.cdx.json"


def needed(name: str = "trilemma") -> Iterator[tuple[str, str]]:
    """Yield a package and what it needs, with versions, as they are installed; extras only where installed.

    >>> dict(needed("packaging")).keys() >= {"packaging"}
    True
    """
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        one = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if one in seen:
            continue
        seen.add(one)
        try:
            found = importlib.metadata.distribution(one)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield one, found.version
        plain = [text for text in found.requires or () if "extra ==" not in text]
        waiting += [match.group() for text in plain if (match := re.match(r"[A-Za-z0-9._-]+", text))]


def sbom(made: str) -> str:
    """Return the bill of materials as CycloneDX JSON, the same text for the same packages."""
    try:
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError:
        raise UserError(
            "a bill of materials needs cyclonedx-python-lib: pip install 'trilemma[evidence]'"
        ) from None
    import datetime as dt

    found = sorted(needed())
    parts = {
        name: Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{name}@{version}",
            purl=PackageURL("pypi", None, name, version),
        )
        for name, version in found
    }
    root = parts.pop("trilemma", None)
    when = dt.datetime.fromisoformat(made).replace(tzinfo=dt.UTC)
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"trilemma sbom {found} {made}")
    bom = Bom(
        components=parts.values(), metadata=BomMetaData(component=root, timestamp=when), serial_number=number
    )
    if root is not None:
        bom.register_dependency(root, parts.values())
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return text + "\n"
