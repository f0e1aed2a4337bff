"""Rollout engines, their weights and DeepSpeed on a CUDA device: what they promise on a CPU, asked there again.

The contract runs in a process of its own for each engine and setting: vLLM's sleep mode holds one engine a process.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.test_cuda import FP32, engine_on, scores, train
from tests.support.losses import optim_section
from tests.support.tiny_models import make_tiny_model
from verl.models.loader import ModelSpec
from verl.workers.engine import Want, build_engine

pytestmark = pytest.mark.gpu

GRAPHS = {"enforce_eager": False}


def contract(marks: str, options: dict, **environment: str) -> None:
    """Run tests/workers/rollout/test_contract.py with the engines on CUDA."""
    env = {**os.environ, "VERL_TEST_DEVICE": "cuda", "VERL_TEST_ROLLOUT": json.dumps(options), **environment}
    command = [sys.executable, "-m", "pytest", "-m", marks, "tests/workers/rollout/test_contract.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    print(done.stdout[-5000:])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


def test_hf_keeps_its_contract():
    contract("not vllm and not sglang", {})


@pytest.mark.vllm
@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1 runner", "V2 runner"])
@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["eager", "graphs"])
def test_vllm_keeps_its_contract(options, runner):
    contract("vllm", {"gpu_memory_utilization": 0.2, **options}, VLLM_USE_V2_MODEL_RUNNER=runner)


@pytest.mark.sglang
@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["eager", "graphs"])
def test_sglang_keeps_its_contract(options):
    contract("sglang", {"gpu_memory_utilization": 0.2, **options})


CLASSIFIER = """
import sys, torch
from verl.config.reward import RewardModelConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
folder, name, device = sys.argv[1:]
options = {"name": name, "dtype": "float32", "max_model_len": 64, "gpu_memory_utilization": 0.3}
engine = get_rollout_class(name, classifies=True)(
    folder, RewardModelConfig(enable=True, rollout=options).engine_options(), device
)
texts = [Request(tuple(range(3, 3 + length)), SamplingParams(1)) for length in (2, 17, 40)]
found, free = [], []
for _ in range(3):
    assert engine.is_asleep
    free.append(torch.cuda.mem_get_info()[0] if device == "cuda" else 1)
    engine.wake()
    free.append(torch.cuda.mem_get_info()[0] if device == "cuda" else 0)
    found.append([completion.score for completion in engine.generate(texts, 0)])
    engine.sleep()
assert found[0] == found[1] == found[2] and len(set(found[0])) == 3, found
assert free[2] > free[3] and free[4] > free[5], free
assert device == "cpu" or free[2] - free[3] > 0.2 * torch.cuda.mem_get_info()[1], free
getattr(engine, "close", lambda: None)()
"""


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")])
def test_a_classifier_scores_the_same_after_it_slept_and_its_memory_was_free(name, tmp_path, device="cuda"):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    folder = make_tiny_model(tmp_path / "rm", head="sequence", initializer_range=0.3, **heads)
    done = subprocess.run([sys.executable, "-c", CLASSIFIER, str(folder), name, device], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]


# -- the ways weights take -----------------------------------------------------------------------------------------

TAKE = """
import json, sys, torch
from verl.workers.rollout.sglang.process import open_bucket
from verl.workers.rollout.weights.sync import checksum
for line in sys.stdin:
    with open_bucket(json.loads(line), torch.device("cuda", 0)) as bucket:
        print(json.dumps({name: checksum(tensor) for name, tensor in bucket}), flush=True)
"""


def test_a_bucket_arrives_in_another_process_by_its_cuda_handle():
    from verl.workers.rollout.sglang.process import CudaIpcBuffer
    from verl.workers.rollout.weights.sync import checksum

    shared = CudaIpcBuffer()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TAKE], **pipes) as taker:
        for step in range(3):  # the buffer is used again, and grows once
            bucket = [
                (f"a{step}", torch.randn(100, 33 * (step + 1), device="cuda")),
                (f"b{step}", torch.randn(7, device="cuda").bfloat16()),
            ]
            taker.stdin.write(json.dumps(shared.pack(bucket)) + "\n")
            taker.stdin.flush()
            assert json.loads(taker.stdout.readline()) == {name: checksum(tensor) for name, tensor in bucket}
        taker.stdin.close()
    shared.close()


LINK = """
import json, sys, time, torch
from verl.workers.rollout.base import Receipt
from verl.workers.rollout.weights.link import WeightLink, WeightLinkError, find_store, open_store
from verl.workers.rollout.weights.sync import checksum

rank, port, behaviour = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank)
if rank == 0:
    store = open_store("127.0.0.1", 20.0)
    print(store.port, flush=True)
else:
    store = find_store("127.0.0.1", port, 20.0)
link = WeightLink(store, rank, 2, torch.device("cuda", rank), 20.0)
weights = [(f"w{i}", torch.full((1000, 1000), float(i), device="cuda")) for i in range(8)]


class Holder:
    version = None
    def invalidate(self): self.version = None
    def update_weights(self, version, buckets):
        sums, size = {}, 0
        for number, bucket in enumerate(buckets):
            if behaviour == "dies" and number == 2:
                import os
                os._exit(9)
            sums |= {name: checksum(tensor) for name, tensor in bucket}
            size += sum(tensor.nbytes for _, tensor in bucket)
        self.version = version
        return Receipt(version, sums, size)

start = time.monotonic()
try:
    if rank == 0:
        link.send(weights, 1, 4 << 20, torch.float32)
    else:
        link.receive(Holder())
    print("done", flush=True)
except WeightLinkError as error:
    print(f"error after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""


@pytest.mark.parametrize("behaviour, expected", [("takes", "done"), ("dies", "error after")])
def test_weights_cross_over_nccl_and_a_lost_receiver_is_an_error_in_time(behaviour, expected):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    pipes = {"stdout": subprocess.PIPE, "text": True}
    sender = subprocess.Popen([sys.executable, "-c", LINK, "0", "0", behaviour], **pipes)
    port = sender.stdout.readline().strip()
    receiver = subprocess.Popen([sys.executable, "-c", LINK, "1", port, behaviour], **pipes)
    output, _ = sender.communicate(timeout=120)
    receiver.wait(timeout=60)
    assert sender.returncode == 0 and expected in output


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_zero_trains_on_the_gpu_as_on_the_cpu(tmp_path, stage, offload):
    pytest.importorskip("deepspeed")
    folder = make_tiny_model(tmp_path)
    here = engine_on("cpu", folder)
    config = {"zero_stage": stage, "stage3_param_persistence_threshold": 0}
    sharding = {"param_offload": offload, "optimizer_offload": offload}
    options = {"total_steps": 10, "grad_clip": 1.0, "seed": 1, "device": "cuda", "backend_config": config}
    engine = build_engine("deepspeed", ModelSpec(folder, compute_dtype="fp32"), sharding, optim_section(), **options)
    for one, other in zip(train(engine, 3), train(here, 3), strict=True):
        assert one == pytest.approx(other, rel=FP32, abs=FP32)
    torch.testing.assert_close(scores(engine, Want.LOG_PROBS), scores(here, Want.LOG_PROBS), rtol=FP32, atol=10 * FP32)
