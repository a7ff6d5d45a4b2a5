import tomllib
from pathlib import Path

import pytest

from recsys_tpu import versions


def test_pins_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    exact = dict(item.split("==") for item in project["dependencies"] if "==" in item)
    exact.pop("fbgemm-gpu")  # the name holder of packaging/, at the version of fbgemm-gpu-cpu
    assert exact == versions.PINS


def test_the_installed_packages_match() -> None:
    versions.check_versions()


def test_a_mismatch_names_both_versions_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "2.4.0+cpu" if name == "torch" else real(name))
    with pytest.raises(versions.VersionMismatchError) as error:
        versions.check_versions()
    assert f"torch: needs {versions.PINS['torch']}, found 2.4.0+cpu" in str(error.value)
    assert f"pip install torch=={versions.PINS['torch']}" in str(error.value)
    assert "torchrec: needs" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.PINS, "no-such-package", "1.0")
    with pytest.raises(versions.VersionMismatchError, match=r"no-such-package: needs 1\.0, not installed"):
        versions.check_versions()
