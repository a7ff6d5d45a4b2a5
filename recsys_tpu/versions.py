"""The versions that must match: fbgemm's binary is built against one torch, torchrec against both.

A mismatch shows elsewhere as an undefined symbol or a crash inside an operator; here it is an
error that names both versions and the command that mends it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# Mirrors pyproject.toml (tests/test_versions.py holds the two together).
PINS: dict[str, str] = {
    "torch": "2.13.0",
    "torchrec": "1.9.2",
    "fbgemm-gpu-cpu": "1.8.0",
}


class VersionMismatchError(ImportError):
    """An installed package is not the version that recsys_tpu was built for."""


def check_versions() -> None:
    """Compare the installed packages with `PINS`.

    Raises:
        VersionMismatchError: a package is missing or of another version; the message names what was
            found, what is needed and the pip command that installs it.
    """
    problems = []
    for package, wanted in PINS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            problems.append(f"{package}: needs {wanted}, not installed")
            continue
        if found.split("+")[0] != wanted:  # "2.13.0+cpu" is torch 2.13.0
            problems.append(f"{package}: needs {wanted}, found {found}")
    if problems:
        command = "pip install " + " ".join(f"{package}=={wanted}" for package, wanted in PINS.items())
        listing = "\n  ".join(problems)
        raise VersionMismatchError(
            f"recsys_tpu needs packages that were built for each other:\n  {listing}\nTo mend it: {command}"
        )
