"""The commands of the Kubernetes training jobs, as two pods would run them: real launchers, eight ranks of one job."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_get import free_port
from tests.support.manifests import find, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, pathlib
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DYNAMIX_JOB", "DYNAMIX_NODE")
pathlib.Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
"""


def command(kind: str) -> list[str]:
    spec: dict[str, Any] = find(training(), kind, "mnist")["spec"]
    return (spec["trainer"] if kind == "TrainJob" else spec["template"]["spec"]["containers"][0])["command"]


def environment(kind: str, index: int, port: int) -> dict[str, str]:
    """What the manifest, Kubernetes and Kubeflow Trainer set in a pod; the first pod is this machine."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "NODE_NAME": f"node-{index}.example",
        "JOB_UID": "0b3ad2c4-7d8e-4f6a-9a51-2c1f0e9d8b7a",
        "JOB_COMPLETION_INDEX": str(index),
    }
    if kind == "TrainJob":
        environ |= {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
    return environ


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
async def test_two_pods_are_one_job_of_eight_ranks(tmp_path: Path, kind: str) -> None:
    port = free_port()
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [word.replace("mnist-0.mnist:29400", f"127.0.0.1:{port}") for word in command(kind)]
    pods = [
        await asyncio.create_subprocess_exec(
            *words, cwd=tmp_path, env=environment(kind, index, port), stderr=asyncio.subprocess.PIPE
        )
        for index in range(2)
    ]
    try:
        said = await asyncio.gather(*[pod.communicate() for pod in pods])
    finally:
        for pod in pods:
            if pod.returncode is None:
                pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(8)]
    assert {one["WORLD_SIZE"] for one in ranks} == {"8"}
    assert {one["DYNAMIX_JOB"] for one in ranks} == {"mnist-0b3ad2c4"}
    by_node = {(one["DYNAMIX_NODE"], one["LOCAL_RANK"]) for one in ranks}
    assert by_node == {(f"node-{node}", str(rank)) for node in range(2) for rank in range(4)}
