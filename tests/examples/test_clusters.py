"""Jobs for Slurm and SkyPilot, with stand-ins for their tools; what images copy and install is there."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.commands import NOTE_TAKER, ROOT, main_ppo_overrides
from verl.config.load import load_ppo_config

PINS = (ROOT / "requirements.txt").read_text().splitlines()

STUBS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1 10.0.0.7",
    "scontrol": 'echo "$@" >> "$TOOLS"; if [ "$1" = show ]; then echo node1; echo node2; fi',
    "ray": 'echo "$@" >> "$TOOLS"; if [ "$1" = status ]; then printf "Active:\\n 1 node_a\\n 1 node_b\\n"; fi',
}
"""``ray`` says what the real one does: see `test_the_nodes_of_a_job_are_counted_on_a_real_ray`."""


def run_with_stubs(command, folder, others=None, timeout_s=120, **environment):
    """The overrides of the training that ``command`` starts, its exit code, and the calls of the cluster's tools.

    Args:
        others: stubs in place of those of ``STUBS``.
    """
    stubs = STUBS | (others or {}) | {"python3": NOTE_TAKER.split("\n", 1)[1] + f"exit {environment.get('CODE', 0)}"}
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in stubs.items():
        path = folder / ".venv" / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for name in ("calls", "tools"):
        (folder / name).write_text("")
    (folder / "examples").symlink_to(ROOT / "examples")
    env = (
        outside_ray()
        | {"CALLS": str(folder / "calls"), "TOOLS": str(folder / "tools"), "REPO": str(folder)}
        | environment
    )
    env["PATH"] = f"{folder / '.venv' / 'bin'}:{env['PATH']}"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    calls = [call.splitlines() for call in (folder / "calls").read_text().split("== call\n")[1:]]
    return main_ppo_overrides(calls), done, (folder / "tools").read_text()


@pytest.fixture
def own_ray(tmp_path):
    """Environment of Ray on a port and in a folder of its own, and with a token; it ends with the test."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    folder = Path(tempfile.mkdtemp(prefix="verl-ray-", dir="/tmp"))  # its sockets allow no long names
    yield {"RAY_PORT": port, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
    processes = [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("RAY_PORT") == port]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, 20)
    shutil.rmtree(folder)


@pytest.mark.ray
def test_the_nodes_of_a_job_are_counted_on_a_real_ray(own_ray, tmp_path):
    real = f'exec "{Path(sys.executable).parent}/ray" "$@"'
    address = "echo 127.0.0.1 $REAL_ADDRESS"
    script = str(ROOT / "examples" / "slurm" / "ray_on_slurm.slurm")
    environment = {**JOB, **own_ray, "REAL_ADDRESS": ray_address(), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    stubs = {"ray": real, "hostname": address}
    found, done, tools = run_with_stubs(["bash", script], tmp_path, stubs, timeout_s=200, **environment)
    assert done.returncode == 0 and "2 of 2 nodes have joined Ray" in done.stdout, done.stdout + done.stderr
    [words] = found
    assert load_ppo_config(words).trainer.nnodes == 2


def ray_address() -> str:
    """The address of this machine that Ray takes in place of loopback, in a process that has started no Ray."""
    code = "from ray.util import get_node_ip_address; print(get_node_ip_address())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=outside_ray())
    if (address := done.stdout.strip()).startswith("127."):
        pytest.skip("this machine has no address but loopback's")
    return address


def outside_ray() -> dict[str, str]:
    """This process's environment without what the clusters of other tests have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize("code", ["0", "75"])
def test_a_job_of_several_nodes_starts_ray_and_one_driver_and_is_queued_again_when_it_was_stopped(code, tmp_path):
    script = str(ROOT / "examples" / "slurm" / "ray_on_slurm.slurm")
    [words], done, tools = run_with_stubs(["bash", script, "trainer.seed=7"], tmp_path, CODE=code, **JOB)
    assert done.returncode == int(code), done.stderr
    config = load_ppo_config(words)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.seed) == (2, 4, 7)
    assert "start --head --node-ip-address=10.0.0.7" in tools and "start --address=10.0.0.7:6379" in tools
    assert ("requeue 7" in tools) == (code == "75")


def test_a_job_of_one_node_runs_a_recipe(tmp_path):
    script = str(ROOT / "examples" / "slurm" / "run_one_node.slurm")
    recipe = "examples/grpo_trainer/run_gsm8k_qwen2_5_0_5b.sh"
    [words], done, tools = run_with_stubs(["bash", script, recipe, "trainer.seed=7"], tmp_path, CODE="75", **JOB)
    config = load_ppo_config(words)
    assert done.returncode == 75 and "requeue 7" in tools and config.trainer.default_local_dir.endswith("slurm-7")
    assert (config.trainer.n_gpus_per_node, config.trainer.seed) == (4, 7)


@pytest.mark.parametrize("task", sorted((ROOT / "examples" / "skypilot").glob("*.yaml")), ids=lambda path: path.name)
def test_a_skypilot_task_composes(task, tmp_path):
    content = yaml.safe_load(task.read_text())
    known = {"name", "num_nodes", "resources", "envs", "workdir", "file_mounts", "setup", "run"}
    assert content.keys() <= known and all(isinstance(content[name], str) for name in ("setup", "run"))
    for name in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", content[name]], check=True)
    nodes = str(content.get("num_nodes", 1))
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": nodes}
    sky |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", **content["envs"]}
    [words], done, _ = run_with_stubs(["bash", "-c", content["run"]], tmp_path, **sky)
    config = load_ppo_config(words)
    assert done.returncode == 0 and config.trainer.world_size == 8 * int(nodes)
    assert config.trainer.default_local_dir.startswith("/checkpoints/") and "/checkpoints" in content["file_mounts"]


def test_a_job_of_kuberay_has_what_its_training_asks_for(tmp_path):
    (manifest,) = (ROOT / "examples" / "kuberay").glob("*.yaml")
    kinds = {one["kind"]: one for one in yaml.safe_load_all(manifest.read_text())}
    job = kinds["RayJob"]["spec"]
    cluster, (workers,) = job["rayClusterSpec"], job["rayClusterSpec"]["workerGroupSpecs"]
    head_pod, worker_pod = cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]
    (head,), (worker,) = head_pod["containers"], worker_pod["containers"]
    variables = {one["name"]: one["value"] for one in head["env"]}
    [words], done, _ = run_with_stubs(["bash", "-c", job["entrypoint"]], tmp_path, **variables)
    config = load_ppo_config(words)
    assert done.returncode == 0, done.stderr
    assert config.trainer.nnodes == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert str(config.trainer.n_gpus_per_node) == worker["resources"]["limits"]["nvidia.com/gpu"]
    assert cluster["authOptions"] == {"mode": "token"} and f"ray=={cluster['rayVersion']}" in PINS
    assert {port["containerPort"] for port in head["ports"]} == {6379, 8265}
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    for pod, container in ((head_pod, head), (worker_pod, worker)):
        volumes = {one["name"]: one for one in pod["volumes"]}
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim
        assert container["image"] == worker["image"] and container["env"] == worker["env"]
    policy, labels = kinds["NetworkPolicy"]["spec"], workers["template"]["metadata"]["labels"]
    own = {"matchLabels": labels}  # other clusters of the namespace are not closed, nor let in
    assert labels == cluster["headGroupSpec"]["template"]["metadata"]["labels"] and policy["podSelector"] == own
    assert policy["ingress"][0] == {"from": [{"podSelector": own}]}
    files = [config.data.train_files, config.data.val_files, config.trainer.default_local_dir, variables["HF_HOME"]]
    assert all(file.startswith("/shared/") for file in files), files


@pytest.mark.parametrize("image", sorted((ROOT / "docker").glob("Dockerfile.*")), ids=lambda path: path.name)
def test_an_image_copies_and_calls_what_is_there(image):
    text = image.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD"} and "FROM" in words
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
        if line.startswith("RUN"):
            subprocess.run(["bash", "-n", "-c", line.removeprefix("RUN ")], check=True)
    assert all((ROOT / name).exists() for name in re.findall(r"scripts/\w+\.\w+", text))
