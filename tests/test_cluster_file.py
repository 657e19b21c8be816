"""ray_cluster.yaml: as it stands and in its AMD variant, what Ray's cluster launcher accepts and the shell can run."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
CLUSTER_FILE = ROOT / "ray_cluster.yaml"


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice: {keys}"
        return super().construct_mapping(node, deep)


def variant(vendor: str) -> dict[str, Any]:
    """The file with the setup block of `vendor` in force and the other commented out."""
    text = CLUSTER_FILE.read_text()
    blocks = re.findall(r"^# >>> (\w+) nodes\n(.*?)^# <<< \1 nodes$", text, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["NVIDIA", "AMD"]
    for name, block in blocks:
        bare = [line.removeprefix("# ") if name == "AMD" else line for line in block.splitlines()]
        text = text.replace(block, "".join(f"{line}\n" if name == vendor else f"# {line}\n" for line in bare))
    return yaml.load(text, Loader=StrictLoader)


def commands(config: dict[str, Any]) -> list[str]:
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


@pytest.fixture(params=["NVIDIA", "AMD"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return variant(request.param)


def test_the_file_as_it_stands_is_the_nvidia_variant() -> None:
    assert yaml.load(CLUSTER_FILE.read_text(), Loader=StrictLoader) == variant("NVIDIA")


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == len(config["provider"]["worker_ips"])


def test_ray_s_schema_is_really_asked(config: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="worker_setup"):
        validate_config(prepare_config(config | {"worker_setup": []}))


def test_commands_are_good_bash(config: dict[str, Any]) -> None:
    for command in commands(config):
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{command}: {checked.stderr}"


@pytest.mark.parametrize(
    ("program", "module", "name"),
    [("ray start", "ray.scripts.scripts", "start"), ("mlflow server", "mlflow.cli", "server")],
)
def test_options_exist(program: str, module: str, name: str) -> None:
    cli: click.Command = getattr(import_module(module), name)
    known = {name for option in cli.params for name in (*option.opts, *option.secondary_opts)}
    lines = [c.partition(program)[2] for c in commands(variant("NVIDIA")) if program in c]
    given = {word.partition("=")[0] for line in lines for word in shlex.split(line) if word.startswith("--")}
    assert given
    assert given <= known


def test_nothing_listens_beyond_loopback_without_a_token(config: dict[str, Any], tmp_path: Path) -> None:
    environment = run_setup_printf(config, tmp_path)
    assert "export RAY_AUTH_MODE=token" in environment
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    listening = [c for c in config["head_start_ray_commands"] if "--head" in c or "mlflow server" in c]
    assert len(listening) == 2
    assert all(re.search(r"--(dashboard-)?host[= ]127\.0\.0\.1", command) for command in listening)


def test_amd_nodes_get_amdsmi_and_a_rocm_torch_and_nvidia_nodes_do_not(tmp_path: Path) -> None:
    amd, nvidia = " ".join(commands(variant("AMD"))), " ".join(commands(variant("NVIDIA")))
    for mark in (".whl[amd]", "whl/rocm", "HIP_VISIBLE_DEVICES"):
        assert mark in amd
        assert mark not in nvidia


def run_setup_printf(config: dict[str, Any], home: Path) -> list[str]:
    """Lines of the wattune.env that the setup commands write."""
    (command,) = (c for c in config["setup_commands"] if c.startswith("printf"))
    subprocess.run(["bash", "-c", command], env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, check=True)
    return (home / "wattune.env").read_text().splitlines()


def test_the_environment_puts_the_venv_first(config: dict[str, Any], tmp_path: Path) -> None:
    run_setup_printf(config, tmp_path)
    shown = subprocess.run(
        ["bash", "-c", ". ~/wattune.env && echo $PATH"],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{tmp_path}/wattune-venv/bin:/usr/bin:/bin\n"


def test_the_wheel_it_mounts_is_the_one_this_tree_builds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"{project['name']}-{project['version']}-py3-none-any.whl"
    config = variant("NVIDIA")
    assert config["file_mounts"][f"~/{wheel}"] == f"dist/{wheel}"
    assert any(f"~/{wheel}" in command for command in config["setup_commands"])
    assert (ROOT / config["file_mounts"]["~/constraints.txt"]).is_file()
