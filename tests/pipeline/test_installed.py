"""Errors name a package that is missing, or why it cannot be imported."""

from __future__ import annotations

from importlib import metadata

import pytest

from headrace import installed
from headrace.installed import MissingPackageError, import_extra, lacking, unmet, why_not


def test_an_installed_package_has_no_unmet_requirement():
    assert unmet("tensordict") == []


def test_the_error_for_a_wrong_version_names_the_required_version(monkeypatch):
    """An example is torchrl 0.14.1 beside tensordict 0.10.0, which verl requires."""
    monkeypatch.setattr(metadata, "requires", lambda name: ["tensordict<0.15,>=0.14.3", "torch"])
    monkeypatch.setattr(
        installed, "version_of", {"torchrl": "0.14.1", "tensordict": "0.10.0", "torch": "2.13.0"}.get
    )

    def broken(name):
        raise ImportError("cannot import name 'TensorClass'")

    monkeypatch.setattr(installed, "import_module", broken)
    assert why_not("torchrl") == (
        "TorchRL: pip install 'headrace[torchrl]'. torchrl 0.14.1 is installed and cannot be imported: it "
        "requires tensordict<0.15,>=0.14.3, and 0.10.0 is installed"
    )


def test_the_error_for_a_package_that_cannot_be_imported_has_the_reason(monkeypatch):
    """An example is pyarrow 26 beside numpy 1.26, which pip installs together."""
    monkeypatch.setattr(installed, "unmet", lambda name: [])

    def broken(name):
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr(installed, "import_module", broken)
    said = "is installed and cannot be imported: ImportError: numpy.core.multiarray failed to import"
    with pytest.raises(MissingPackageError, match=f"^a report needs pyarrow: pip install pyarrow. .* {said}"):
        import_extra("pyarrow", "a report")


def test_an_error_of_another_module_is_unchanged():
    """A misspelled import inside headrace is not a missing package."""
    err = ImportError("cannot import name 'nothing' from 'headrace.transforms'", name="headrace.transforms")
    assert lacking("X", err) is err


def test_an_extra_that_would_break_another_package_is_not_advised(tmp_path, monkeypatch):
    """The error names a trainer that excludes the tensordict of TorchRL, such as verl."""
    info = tmp_path / "trainer-2.0.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: trainer",
        "Version: 2.0",
        "Requires-Dist: tensordict<=0.10.0,>=0.8",
    ]
    (info / "METADATA").write_text(
        "\n".join([*lines, 'Requires-Dist: tensordict<0.9; extra == "old"', "", ""])
    )
    assert "another environment" not in installed.why_not("torchrl")
    monkeypatch.syspath_prepend(tmp_path)
    said = installed.why_not("torchrl")
    because = (
        "in another environment, because trainer 2.0 requires tensordict<=0.10.0,>=0.8, and TorchRL another"
    )
    assert because in said
    assert "0.9" not in said
