"""examples/cluster/wattune.sbatch, run as Slurm would: each node is a namespace of this machine."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.record.results import Results

SCRIPT = Path(__file__).parents[1] / "examples" / "cluster" / "wattune.sbatch"
APART = ["unshare", "--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]

SBATCH = """
mount -t tmpfs shm /dev/shm
ip link set lo up
ip link add eth0 type bridge
ip address add 10.77.0.1/24 dev eth0
ip link set eth0 up
ip route add default dev eth0
"$@"
"""
"""The first node, where Slurm runs the script; its network is a bridge, which others are joined to."""

SRUN = f"""#!/bin/bash
export SLURM_STEP_ID=$$
trap 'kill -KILL $(jobs -p)' TERM
while [[ $1 == --* ]]; do shift; done
for ((node = 2; node <= SLURM_JOB_NUM_NODES; node++)); do
    {" ".join(APART)} bash -c '
        mount -t tmpfs shm /dev/shm
        mkdir -p "$RAY_TMPDIR" && mount -t tmpfs ray "$RAY_TMPDIR"
        until ip link set eth0 up 2> /dev/null; do sleep 0.1; done
        ip link set lo up
        ip address add "10.77.0.$0/24" dev eth0
        ip route add default dev eth0
        "$@"
    ' "$node" "$@" &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
    ip link add "v$!" type veth peer name eth0 netns $!
    ip link set "v$!" master eth0 up
done
unshare --mount --pid --fork --kill-child --mount-proc bash -c '"$@"; exit $?' task "$@" &
wait $!
code=$?
wait
exit $code
"""
"""A task on each node: here, on the first, and on others, which are made for it. What a task started ends with it."""

SCANCEL = """#!/bin/bash
kill "${1#*.}"
"""
"""A step is known by the process of its `srun`."""

SPEC = {
    "name": "slurm",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 4,
    "cluster": {"nodes": 2, "gpus_per_node": 1, "accelerator": "cpu", "cpus_per_worker": os.cpu_count() or 1},
    "space": {"zero_stage": [0, 1], "precision": "fp32"},
    "measurement": {"window_s": 0.5, "window_min_steps": 3, "warmup_max_s": 0.5, "deadline_s": 120},
    "budget": {"trials": 2},
    "finalists": {"count": 0},
    "sentinel_every": 0,
}
"""One worker fits on a node, so that two nodes it takes."""


def namespaces() -> bool:
    """Whether nodes can be made of this machine here."""
    return subprocess.run([*APART, "ip", "link", "add", "eth0", "type", "bridge"], capture_output=True).returncode == 0


def test_it_is_good_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes: a home, and a submit directory that holds a spec."""
    bin_directory, home, submitted = tmp_path / "bin", tmp_path / "home", tmp_path / "submitted"
    home.mkdir()
    (home / "wattune-venv").symlink_to(sys.prefix)
    bin_directory.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        (bin_directory / name).write_text(text)
        (bin_directory / name).chmod(0o755)
    submitted.mkdir()
    (submitted / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    return {
        "PATH": f"{bin_directory}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "HOME": str(home),
        "SLURM_SUBMIT_DIR": str(submitted),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "OMP_NUM_THREADS": "1",
    }


def submitted(job: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a job of the script with these arguments prints and ends with."""
    command = [*APART, "bash", "-c", SBATCH, "sbatch", "bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        env=job,
        cwd=job["SLURM_SUBMIT_DIR"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="no namespaces with a network can be made here")
def test_a_search_runs_to_its_end_on_two_nodes(job: dict[str, str]) -> None:
    done = submitted(job, "run", "spec.yaml")
    assert done.returncode == 0, done.stdout
    (record,) = Results(f"sqlite:///{job['SLURM_SUBMIT_DIR']}/.wattune/mlflow.db").searches()
    assert record.status == "finished", done.stdout
    assert [trial.status for trial in record.trials] == ["ok", "ok"], done.stdout
    token = Path(job["HOME"], ".ray", "auth_token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text().strip() not in done.stdout
    assert not Path(f"/tmp/ray-{job['SLURM_JOB_ID']}").exists()


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="no namespaces with a network can be made here")
def test_a_search_that_is_refused_fails_the_job(job: dict[str, str]) -> None:
    done = submitted(job, "run", "nowhere.yaml")
    assert done.returncode == 2, done.stdout
    assert "wattune: nowhere.yaml" in done.stdout
