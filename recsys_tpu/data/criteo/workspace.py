"""What is done and under which recipe: the state that lets a killed run continue.

It lives in ``_work`` inside the output directory and is deleted when metadata.json is written.  A step is
done when its JSON file exists; every such file is written atomically after what it vouches for.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from recsys_tpu.data.metadata import METADATA_FILE, DatasetError, write_json_atomically

_MISSING = "(absent)"
_SHOWN_CHARACTERS = 80


class RecipeMismatch(DatasetError):
    """The output directory was begun or made under other choices or from other files."""


class Workspace:
    """State of a run in `output`/_work, locked against a second run while it is open."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.root = output / "_work"

    def __enter__(self) -> Workspace:
        if self.output.is_dir() and any(self.output.iterdir()) and not self.root.is_dir():
            raise DatasetError(
                f"{self.output}: not empty and not a directory that this command began; give another --output"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] = (self.root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DatasetError(
                f"{self.output}: another preprocess run is writing here; wait for it or give another --output"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def claim(self, name: str, content: Mapping[str, object]) -> None:
        """Store what this run is about, or check that it is what an earlier run stored.

        Raises:
            RecipeMismatch: naming every difference.
        """
        stored = self.load(name)
        if stored is None:
            self.save(name, content)
        else:
            check_same(self.output, stored, content)

    def load(self, name: str) -> dict[str, object] | None:
        """Content of the step `name`, or None where it is not done."""
        try:
            content: dict[str, object] = json.loads((self.root / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return content

    def save(self, name: str, content: Mapping[str, object]) -> None:
        path = self.root / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, content)

    def delete(self) -> None:
        shutil.rmtree(self.root)


def check_same(output: Path, stored: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise `RecipeMismatch` with all differences between what `output` holds and what is wanted."""
    wanted = json.loads(json.dumps(wanted))
    differences = list(_differences("", stored, wanted))
    if differences:
        state = "was made" if (output / METADATA_FILE).exists() else "was begun"
        raise RecipeMismatch(
            f"{output} {state} with other choices or files: {'; '.join(differences)}. "
            "Give the same ones to continue, or another --output"
        )


def _differences(name: str, stored: object, wanted: object) -> Iterator[str]:
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*stored, *wanted]):
            yield from _differences(
                f"{name}.{key}" if name else key, stored.get(key, _MISSING), wanted.get(key, _MISSING)
            )
    elif isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        for index, (old, new) in enumerate(zip(stored, wanted, strict=True)):
            yield from _differences(f"{name}[{index}]", old, new)
    elif stored != wanted:
        yield f"{name} was {_show(stored)}, now {_show(wanted)}"


def _show(value: object) -> str:
    text = value if value is _MISSING else json.dumps(value)
    assert isinstance(text, str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
