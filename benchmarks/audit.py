"""Look for known vulnerabilities of the installed packages without the network.

    git clone https://github.com/pypa/advisory-database
    python benchmarks/audit.py advisory-database

`pip-audit` asks PyPI for the same advisories; use it where PyPI can be reached.  This reads a checkout of
their source, so that a machine without a way out can be audited too.  The command fails if an installed
version is affected.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


def affected(version: Version, advisory: dict[str, Any], package: str) -> bool:
    """Whether an advisory in OSV's format is of this version of `package`."""
    for entry in advisory.get("affected", []):
        if canonicalize_name(entry["package"]["name"]) != package:
            continue
        if str(version) in entry.get("versions", []):
            return True
        for span in entry.get("ranges", []):
            if span["type"] == "ECOSYSTEM" and _inside(version, span["events"]):
                return True
    return False


def _inside(version: Version, events: list[dict[str, str]]) -> bool:
    """OSV: affected from `introduced` on, up to `fixed` (without it) or `last_affected` (with it)."""
    inside = False
    for event in events:
        if "introduced" in event:
            inside = inside or event["introduced"] == "0" or version >= Version(event["introduced"])
        elif "fixed" in event:
            inside = inside and version < Version(event["fixed"])
        elif "last_affected" in event:
            inside = inside and version <= Version(event["last_affected"])
    return inside


def findings(advisories: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(package, version, advisory) of every installed package that an advisory is about."""
    for package in importlib.metadata.distributions():
        name = canonicalize_name(package.metadata["Name"])
        try:
            # a local version such as 2.13.0+cpu is the public one for an advisory
            version = Version(Version(package.version).public)
        except InvalidVersion:
            continue
        for path in sorted((advisories / "vulns" / name).glob("*.yaml")):
            advisory = yaml.safe_load(path.read_text(encoding="utf-8"))
            if "withdrawn" not in advisory and affected(version, advisory, name):
                yield name, str(version), advisory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("advisories", type=Path, help="a checkout of pypa/advisory-database")
    advisories: Path = parser.parse_args().advisories
    known = sum(1 for _ in (advisories / "vulns").glob("*/*.yaml"))
    if not known:
        parser.error(f"{advisories}/vulns holds no advisories")
    date = subprocess.run(
        ["git", "-C", str(advisories), "log", "-1", "--format=%cs"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = list(findings(advisories))
    for name, version, advisory in found:
        aliases = ", ".join([advisory["id"], *advisory.get("aliases", [])])
        print(f"{name} {version}: {aliases}: {advisory.get('details', '').strip().splitlines()[0][:200]}")
    packages = len({package.metadata["Name"] for package in importlib.metadata.distributions()})
    print(f"{packages} packages, {known:,} advisories (of {date or 'an unknown day'}): {len(found)} affected")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
