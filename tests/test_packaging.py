"""The distribution: pins, what is packaged, the console script, and the imports that would break a machine."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
ROOMS = ("service", "trainables", "search_spaces", "telemetry")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins: dict[str, Version] = {}
    for line in lines:
        name, _, version = line.partition("==")
        assert canonicalize_name(name) not in pins, f"{name} is pinned twice"
        pins[canonicalize_name(name)] = Version(version)
    return pins


def requirements(pyproject: dict[str, Any]) -> list[Requirement]:
    project = pyproject["project"]
    return [Requirement(r) for r in (*project["dependencies"], *project["optional-dependencies"]["dev"])]


def test_every_requirement_is_pinned_within_its_range(pyproject: dict[str, Any], pins: dict[str, Version]) -> None:
    for requirement in requirements(pyproject):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_pins_fit_every_build(pins: dict[str, Version]) -> None:
    """A local version such as +cpu would shut out the other builds of the same release."""
    assert [name for name, version in pins.items() if version.local] == []


def test_mlflow_release_that_cannot_be_installed_is_excluded(pyproject: dict[str, Any]) -> None:
    (mlflow,) = (r for r in requirements(pyproject) if r.name == "mlflow")
    assert Version("3.18.0") not in mlflow.specifier
    assert Version("3.18.1") in mlflow.specifier


def test_amdsmi_is_an_extra_and_no_default(pyproject: dict[str, Any], pins: dict[str, Version]) -> None:
    assert "amdsmi" not in {r.name for r in requirements(pyproject)}
    assert "amdsmi" not in pins
    assert [Requirement(r).name for r in pyproject["project"]["optional-dependencies"]["amd"]] == ["amdsmi"]


def imports_on_loading(tree: ast.AST) -> set[str]:
    """Top-level names of the packages that loading a module imports: all but what functions import when called."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        found |= imports_on_loading(node)
    return found


def test_imports_on_loading_sees_through_try_and_class_but_not_functions() -> None:
    source = "try:\n import a.b\nexcept ImportError:\n from c import d\nclass X:\n import e\ndef f():\n import g"
    assert imports_on_loading(ast.parse(source)) == {"a", "c", "e"}


def test_amdsmi_is_never_imported_on_loading() -> None:
    modules = [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    assert modules
    assert [p for p in modules if "amdsmi" in imports_on_loading(ast.parse(p.read_text()))] == []


def test_the_four_rooms_are_packaged_and_nothing_else(pyproject: dict[str, Any]) -> None:
    packaged = find_packages(str(ROOT), include=pyproject["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in packaged} == set(ROOMS)
    folders = {p.parent.relative_to(ROOT) for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    assert {name.replace(".", "/") for name in packaged} == {str(folder) for folder in folders}


def test_every_room_says_that_it_is_typed(pyproject: dict[str, Any]) -> None:
    assert pyproject["tool"]["setuptools"]["package-data"] == {
        "*": ["py.typed", "*.css"],
        "search_spaces": ["trainers/*.yaml"],
    }
    assert [room for room in ROOMS if not (ROOT / room / "py.typed").is_file()] == []
    assert pyproject["tool"]["mypy"]["strict"]


def test_console_script_is_callable(pyproject: dict[str, Any]) -> None:
    module, _, function = pyproject["project"]["scripts"]["wattune"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_import_contracts_cover_the_rooms(pyproject: dict[str, Any]) -> None:
    linter = pyproject["tool"]["importlinter"]
    assert set(linter["root_packages"]) == set(ROOMS)
    rooms, within_service = (contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    assert rooms == ["service", "trainables", "telemetry | search_spaces"]
    named = {name for layer in within_service for name in layer.split(" | ")}
    there = {f"service.{path.stem}" for path in (ROOT / "service").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert named == there - {"service.__init__", "service.__pycache__"}
