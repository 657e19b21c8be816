"""examples/cluster/: what can be told of the image and of the manifests for KubeRay without a Kubernetes cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import mlflow.cli
import pytest
import yaml
from jsonschema import Draft202012Validator

from service.errors import InputError
from service.record import store
from service.record.runs import Runs
from tests.conftest import free_port
from tests.test_cluster_file import ROOT, StrictLoader, variant

FOLDER = ROOT / "examples" / "cluster"
MANIFESTS = ("mlflow", "raycluster", "rayjob")
DOCKERFILE = (FOLDER / "Dockerfile").read_text()

Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    return list(yaml.load_all((FOLDER / f"{name}.yaml").read_text(), Loader=StrictLoader))


def of_kind(kind: str) -> Iterator[Manifest]:
    return (one for name in MANIFESTS for one in manifests(name) if one["kind"] == kind)


def clusters() -> list[Manifest]:
    """What the Ray clusters are, of the RayCluster and of the RayJob."""
    (cluster,), (job,) = of_kind("RayCluster"), of_kind("RayJob")
    return [cluster["spec"], job["spec"]["rayClusterSpec"]]


def pods() -> list[Manifest]:
    """What all pods are."""
    groups = [group for spec in clusters() for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [owner["template"]["spec"] for owner in (*groups, *(one["spec"] for one in of_kind("Deployment")))]


def environment(container: Manifest) -> dict[str, Manifest]:
    return {one["name"]: one for one in container["env"]}


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    return version


def strict(schema: Any) -> Any:
    """A schema that takes no field that it does not name; Kubernetes would drop such ones without a word."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    return {key: strict(value) for key, value in schema.items()} | ({"additionalProperties": False} if closed else {})


@pytest.mark.skipif("KUBERAY_CRDS" not in os.environ, reason="KUBERAY_CRDS names no ray-operator/config/crd/bases")
@pytest.mark.parametrize(("name", "kind"), [("rayclusters", "RayCluster"), ("rayjobs", "RayJob")])
def test_kuberay_s_schema_has_all_fields(name: str, kind: str) -> None:
    definition = yaml.safe_load(Path(os.environ["KUBERAY_CRDS"], f"ray.io_{name}.yaml").read_text())
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema["properties"]["metadata"] = {"type": "object"}
    (manifest,) = of_kind(kind)
    validator = Draft202012Validator(strict(schema))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)] == []
    manifest["spec"]["rayVersions"] = "2.60.0"
    assert not validator.is_valid(manifest)


def test_a_search_of_its_own_has_the_same_cluster() -> None:
    shared, own = clusters()
    assert shared == own


@pytest.mark.parametrize("spec", clusters(), ids=["RayCluster", "RayJob"])
def test_what_kuberay_demands(spec: Manifest) -> None:
    """By its validation: token authentication names Ray's version, and without autoscaling groups are bounded."""
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == pinned("ray")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert not {"livenessProbe", "readinessProbe"} & set(container), "KubeRay has better ones"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert int(limits["nvidia.com/gpu"]) > 0


def test_all_pods_run_one_image_and_nobody_as_root() -> None:
    assert len({container["image"] for pod in pods() for container in pod["containers"]}) == 1
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert {pod["securityContext"]["runAsUser"] for pod in pods()} == {int(user)}
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in pods())


def test_what_is_mounted_is_there() -> None:
    claims = {one["metadata"]["name"] for one in of_kind("PersistentVolumeClaim")}
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_searches_record_where_mlflow_serves_under_the_name_that_it_allows() -> None:
    (service,), (deployment,) = of_kind("Service"), of_kind("Deployment")
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    name = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for spec in clusters():
        (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
        assert environment(head)["MLFLOW_TRACKING_URI"]["value"] == f"http://{name}"
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    (allowed,) = (arg.partition("=")[2] for arg in server["args"] if arg.startswith("--allowed-hosts="))
    assert name in allowed.split(",")


def test_nothing_listens_without_asking_who_is_there() -> None:
    (deployment,) = of_kind("Deployment")
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--app-name=basic-auth" in server["args"]
    header = (FOLDER / "mlflow.yaml").read_text()
    made = set(re.findall(r"--from-literal=(\w+)=", header))
    references = [
        one["valueFrom"]["secretKeyRef"]
        for pod in pods()
        for container in pod["containers"]
        for one in container["env"]
        if "valueFrom" in one
    ]
    assert {one["name"] for one in references} == {"mlflow"}
    assert {one["key"] for one in references} == made


def test_options_of_mlflow_exist() -> None:
    cli: click.Command = mlflow.cli.server
    known = {name for option in cli.params for name in (*option.opts, *option.secondary_opts)}
    (deployment,) = of_kind("Deployment")
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert server["command"] == ["mlflow", "server"]
    assert {arg.partition("=")[0] for arg in server["args"]} <= known


@pytest.mark.slow
def test_mlflow_asks_for_a_name_and_wattune_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flask_wtf", reason="MLflow asks nobody without its extra `auth`")
    (deployment,) = of_kind("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    port = free_port()
    arguments = [arg.replace("/record", str(tmp_path)).replace("0.0.0.0", "127.0.0.1") for arg in container["args"]]
    arguments = [arg.replace("5000", str(port)) for arg in arguments]
    secrets = {"username": "wattune", "password": "a-password-of-some-length", "session": "of-the-session"}
    variables = {
        name: one["value"] if "value" in one else secrets[one["valueFrom"]["secretKeyRef"]["key"]]
        for name, one in environment(container).items()
    }
    uri = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments],
            env=os.environ | variables,
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 120
            while not store.reachable(uri):
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.5)
            with pytest.raises(InputError, match="error code 401"):
                Runs(uri).experiment()
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", secrets["username"])
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secrets["password"])
            store.check(uri)
            assert Runs(uri).find({}) == []
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)


def test_the_image_is_built_of_what_the_distribution_is() -> None:
    lines = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    about = {project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == rooms | about | {"pyproject.toml", "constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line.removeprefix("RUN ")], check=True)


def test_the_image_for_amd_is_of_the_release_that_the_launcher_sets_up() -> None:
    (build,) = re.findall(r"# +AMD: +(.*\n(?:# {7,}.*\n)+)", DOCKERFILE)
    told = dict(one.split("=", 1) for one in shlex.split(build.replace("#", "")) if re.match(r"[A-Z_]+=", one))
    (index,) = {
        word
        for command in variant("AMD")["setup_commands"]
        for word in command.split()
        if word.startswith("https://download.pytorch.org/")
    }
    assert told["TORCH_INDEX"] == index
    assert told["BASE"].partition(":")[2] == index.rpartition("rocm")[2]
    assert told["EXTRA"] == "[amd]"
