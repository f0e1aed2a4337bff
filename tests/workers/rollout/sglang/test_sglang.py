"""What is particular to SGLang: its processes, its options, its traps, sampling by our streams, and a whole run."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.single_controller.test_listening import listening
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_for
from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.sglang.scheduler_functions import HERE
from tests.workers.rollout.test_contract import mixed_requests, processed_log_probs, some_prompts, tokens_of
from verl.utils.py_functional import is_loopback
from verl.utils.tiny_model import make_tiny_model
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, RequestsRunningError, SamplingParams, WeightSyncError
from verl.workers.rollout.sglang.process import EngineDiedError
from verl.workers.rollout.weights.sync import sync_weights

pytestmark = pytest.mark.sglang


def start(folder, **changes):
    return get_rollout_class("sglang")(folder, rollout_config(**{"max_num_seqs": 32, **changes}))


@pytest.fixture
def ready(awake, reference):
    sync_weights(weights_of(reference("tied")), awake, version=1)
    return awake


def inside(rollout, name):
    return rollout.call_schedulers(f"{HERE}:{name}")


# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_engine_and_a_dead_engine_tells_its_last_words(model_folder, capfd):
    rollout = start(
        model_folder("tied"),
        dtype="bfloat16",
        max_model_len=200,
        max_num_seqs=7,
        max_num_batched_tokens=230,
        gpu_memory_utilization=0.3,
        enable_chunked_prefill=False,
        disable_log_stats=False,
        load_format="auto",
        engine_kwargs={"sglang": {"attention_backend": "torch_native", "schedule_policy": "lof", "page_size": None}},
    )
    seen = rollout.engine_arguments()
    expected = {
        "dtype": "bfloat16",
        "context_length": 208,
        "max_running_requests": 7,
        "max_prefill_tokens": 230,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.3,
        "attention_backend": "torch_native",
        "schedule_policy": "lof",
        "log_level": "info",
        "load_format": "auto",
        "tp_size": 1,
    }
    assert {name: seen[name] for name in expected} == expected
    addresses = [address for pid in rollout.pids for address in listening(psutil.Process(pid))]
    assert addresses and all(map(is_loopback, addresses))
    assert inside(rollout, "dtypes") == [["torch.bfloat16"]]
    rollout.generate([Request((5, 6, 7), SamplingParams(4))], 0)
    assert "Prefill batch" in capfd.readouterr().err  # SGLang's own statistics
    rollout.submit(Request((5,) * 9, SamplingParams(150, ignore_eos=True)), 0)
    os.kill(rollout.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=r"(?s)Requests it held: 1.*9 prompt tokens.*last words"):
        while True:
            rollout.step()


def test_a_scheduler_that_hangs_shows_no_steps(ready, monkeypatch):
    monkeypatch.setattr("verl.workers.rollout.sglang.rollout._CHECK_S", 0.0)
    steps = []
    monkeypatch.setattr(ready.monitor, "tick", lambda: steps.append(len(ready.engine.running)))
    request_id = ready.submit(Request((5, 6, 7), SamplingParams(120, ignore_eos=True), 1), 1)
    while not steps:
        ready.step()
    scheduler = ready.pids[1]
    os.kill(scheduler, signal.SIGSTOP)
    stuck = threading.Thread(target=lambda: [ready.step() for _ in range(3)])
    try:
        assert request_id in ready.engine.running, "it was seen while it grew"
        stuck.start()
        stuck.join(timeout=1)
        assert stuck.is_alive() and len(steps) <= 2
    finally:
        os.kill(scheduler, signal.SIGCONT)
    stuck.join()
    ready.abort([request_id])
    assert len(steps) > 1


def test_an_option_the_installed_version_lacks_is_named(model_folder):
    message = r"rollout.engine_kwargs.sglang.swap_spaec=4: the installed SGLang \S+ has no such argument"
    with pytest.raises(ValueError, match=message):
        start(model_folder("tied"), engine_kwargs={"sglang": {"swap_spaec": 4}})


@pytest.mark.parametrize("extra", [{"tp_size": 2}, {"quantization": "fp8"}, {"device": "cuda"}, {"enable_lora": True}])
def test_options_that_are_not_the_users_are_refused(extra, model_folder):
    with pytest.raises(ValueError, match=f"engine_kwargs.sglang.{next(iter(extra))}=.* cannot be set: "):
        start(model_folder("tied"), engine_kwargs={"sglang": extra})


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_responses_are_those_of_hf_with_the_same_seeds(ready, synced):
    requests = mixed_requests() + [
        Request(prompt, SamplingParams(20, temperature=1.5), 2**60 + i) for i, prompt in enumerate(some_prompts(9))
    ]
    generated = [completion.token_ids for completion in ready.generate(requests, 1)]
    assert generated == [completion.token_ids for completion in synced("tied").generate(requests, 1)]


def log_probs_of(ready, reference, change, **sampling):
    """Log-probs of a response, and what they should be: the model's logits through ``change``, step by step."""
    request = Request(some_prompts(1)[0], SamplingParams(12, want_log_probs=True, ignore_eos=True, **sampling), 3)
    (completion,) = ready.generate([request], 1)
    tokens = [*request.prompt_ids, *completion.token_ids]
    with torch.no_grad():
        logits = reference("tied")(torch.tensor([tokens])).logits[0].double()
    first = len(request.prompt_ids)
    expected = [
        change(logits[i - 1], tokens[:i], i - first).log_softmax(-1)[tokens[i]].item()
        for i in range(first, len(tokens))
    ]
    return completion.log_probs, pytest.approx(expected, abs=1e-4)


def cut_below(share):
    return lambda logits, seen, step: logits.masked_fill(logits.softmax(-1) < share * logits.softmax(-1).max(), -1e9)


def penalise(logits, seen, step):
    seen = torch.tensor(sorted(set(seen)))
    return logits.index_copy(0, seen, torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5))


def hot_start(logits, seen, step):
    return logits if step else (logits / 30).masked_fill(logits < logits.topk(5).values[-1], -1e9)


BIAS = {"logit_bias": {7: 9.0}}


def test_min_p_penalties_bans_and_a_hot_first_token_shape_the_distribution(ready, reference):
    banned = tuple(range(0, 100, 2))
    for change, sampling in (
        (cut_below(0.2), {"min_p": 0.2}),
        (cut_below(1.0), {"top_k": 1}),
        (penalise, {"repetition_penalty": 1.5}),
        (lambda logits, *_: logits.index_fill(0, torch.tensor(banned), -1e9), {"banned_token_ids": banned}),
        (lambda logits, _, step: logits / (30 if step == 0 else 1), {"first_token_temperature": 30.0}),
        (hot_start, {"first_token_temperature": 30.0, "first_token_top_k": 5}),
        (lambda logits, *_: logits.index_add(0, torch.tensor([7]), torch.tensor([9.0]).double()), {"extra": BIAS}),
    ):
        found, expected = log_probs_of(ready, reference, change, **sampling)
        assert len(found) == 12 and found == expected, sampling


def test_requests_come_and_go_one_by_one_and_an_aborted_one_keeps_its_beginning(ready):
    prompt = some_prompts(1)[0]
    long = Request(prompt, SamplingParams(160 - len(prompt), ignore_eos=True, want_log_probs=True), 1)
    (whole,) = ready.generate([long], 1)
    first, second = ready.submit(long, 1), ready.submit(long, 1)
    aborted = ready.abort([first, 999])
    assert set(aborted) == {first} and aborted[first].finish_reason == "abort" and ready.num_running == 1
    beginning = aborted[first].token_ids
    assert len(beginning) < len(whole.token_ids) and beginning == whole.token_ids[: len(beginning)]
    assert len(aborted[first].log_probs) == len(beginning)
    with pytest.raises(RequestsRunningError, match="1 submitted requests are running"):
        ready.update_weights(2, [])
    done = {}
    while ready.num_running:
        done |= ready.step()
    assert set(done) == {second} and done[second].token_ids == whole.token_ids


def test_a_running_request_reports_the_tokens_generated_so_far(ready):
    prompt = some_prompts(1)[0]
    hot = {"first_token_temperature": 30.0, "ignore_eos": True, "want_log_probs": True}
    request = Request(prompt, SamplingParams(160 - len(prompt), **hot), 1)
    (whole,) = ready.generate([request], 1)
    request_id, *others = [ready.submit(request, 1) for _ in range(16)]
    counts = []
    while not counts or counts[-1] < len(whole.token_ids):
        part = ready.partial(request_id)
        counts.append(len(part.token_ids))
        assert part.token_ids == whole.token_ids[: counts[-1]]
        assert part.log_probs == pytest.approx(whole.log_probs[: counts[-1]], abs=1e-4)
    assert counts == sorted(counts) and len(set(counts)) > 2, "it grew"
    assert part == ready.partial(request_id), "until it is handed out"
    while ready.num_running:
        ready.step()
    assert not any(ready.partial(ended) for ended in (request_id, *others))


def test_a_stop_text_may_begin_in_a_hot_first_token(ready, model_folder):
    tokenizer = hf_tokenizer(model_folder("tied"))
    (prompt,) = some_prompts(1)
    hot = {"first_token_temperature": 30.0, "ignore_eos": True}
    (free,) = tokens_of(ready, [Request(prompt, SamplingParams(9, **hot), 4)])
    first, both = tokenizer.decode(free[:1]), tokenizer.decode(free[:2])
    for stop, count in ((both, 2), (first, 1)):
        assert tokens_of(ready, [Request(prompt, SamplingParams(9, stop=(stop,), **hot), 4)]) == [free[:count]]


def test_sampling_that_sglang_cannot_do_is_refused(ready):
    with pytest.raises(ValueError, match="rollout.sampling_kwargs.min_new_tokens=2 .*skip_tokenizer_init=false"):
        ready.check_sampling(SamplingParams(3, extra={"min_new_tokens": 2}))
    with pytest.raises(ValueError, match="SamplingParams has no min_tokes=3. It has .*min_new_tokens"):
        ready.check_sampling(SamplingParams(3, extra={"min_tokes": 3}))


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_session_that_sglang_refuses_is_an_error(awake, reference):
    awake.engine.call("manage", "begin_weight_update")  # as an interrupted sync would leave it
    with pytest.raises(RuntimeError, match="SGLang refused.*already open"):
        sync_weights(weights_of(reference("tied")), awake, version=1)
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_a_head_that_came_apart_from_its_embedding_is_caught(awake, reference):
    inside(awake, "untie_head")
    try:
        with pytest.raises(WeightSyncError, match=r"lm_head.weight \(0 of \d+ elements arrived\)"):
            sync_weights(weights_of(reference("tied")), awake, version=1)
    finally:
        inside(awake, "tie_head")
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_memory_that_changed_after_loading_is_caught(awake, reference):
    inside(awake, "spoil_loads")
    try:
        for _ in range(2):  # without SGLang's loader where a load came before, and after the failure with it
            with pytest.raises(WeightSyncError, match="not what was sent: model.layers.0.self_attn.v_proj.weight"):
                sync_weights(weights_of(reference("tied")), awake, version=1)
    finally:
        inside(awake, "mend_loads")
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_a_forgotten_sync_shows_as_nan(ready):
    ready.sleep(level=2)
    ready.wake()
    assert inside(ready, "all_nan") == [True]
    ready.version = 1
    with pytest.raises(FloatingPointError, match="not finite"):
        ready.generate(mixed_requests(), 1)


def test_a_prompt_read_before_is_reused_but_not_over_a_sync(ready, reference):
    ready.generate([Request(tuple(range(4, 90)), SamplingParams(4), i) for i in range(4)], 1)
    assert inside(ready, "cached_tokens")[0] > 80
    sync_weights(weights_of(reference("tied")), ready, version=2)
    assert inside(ready, "cached_tokens") == [0]


def test_a_mixture_of_experts_takes_new_weights(tmp_path):
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.25}
    shape = {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}  # SGLang leaves a tied head apart
    folder = make_tiny_model(tmp_path, family="qwen3_moe", **shape, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rollout = start(folder)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    for request, completion in zip(mixed_requests(), rollout.generate(mixed_requests(), 1), strict=True):
        expected = processed_log_probs(model, request, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
    rollout.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_nothing_outlives_a_worker_that_is_killed(model_folder, tmp_path):
    before = set(Path("/dev/shm").iterdir())
    code = f"""
        import time
        from tests.workers.rollout.sglang.test_sglang import start
        rollout = start({model_folder("tied")!r})  # at the top of a main module without a guard
        print("PIDS", *rollout.pids, rollout.engine.folder, flush=True)
        time.sleep(600)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    root = str(Path(__file__).parents[4])
    worker = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    line = next(line for line in worker.stdout if line.startswith("PIDS")).split()
    pids, folder = [int(pid) for pid in line[1:-1]], Path(line[-1])
    assert len(pids) == 3 and all(psutil.pid_exists(pid) for pid in pids) and folder.is_dir()
    worker.kill()
    worker.wait()
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the engine's processes to be gone")
    assert not folder.exists()
    assert set(Path("/dev/shm").iterdir()) <= before


def two_ranks(folder, model):
    rollout = start(folder, tensor_model_parallel_size=2, max_num_batched_tokens=512)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    generated = [(c.token_ids, c.log_probs) for c in rollout.generate(mixed_requests(), 1)]
    rollout.sleep(level=2)
    rollout.wake()
    receipt = sync_weights(weights_of(model), rollout, version=2)
    request_id = rollout.submit(mixed_requests()[0], 2)
    streamed = {}
    while rollout.num_running:
        streamed |= rollout.step()
    held = rollout.call_schedulers(f"{HERE}:held") if rollout.is_leader else None
    caught = ""
    if rollout.is_leader:
        rollout.call_schedulers(f"{HERE}:spoil_loads")
    try:
        sync_weights(weights_of(model), rollout, version=3)
    except WeightSyncError as error:
        caught = str(error)
    return {
        "generated": generated,
        "again": streamed[request_id].token_ids == generated[0][0],
        "bytes": receipt.num_bytes,
        "held": held,
        "caught": caught,
    }


@pytest.mark.timeout(300)
def test_two_ranks_share_one_engine_over_two_processes(model_folder, reference):
    model = reference("tied")
    before = set(Path("/dev/shm").iterdir())
    ranks = run_ranks(2, two_ranks, model_folder("tied"), model, timeout_s=250)
    assert ranks[0]["generated"] == ranks[1]["generated"] and all(rank["again"] for rank in ranks)
    for request, (tokens, log_probs) in zip(mixed_requests(), ranks[0]["generated"], strict=True):
        assert log_probs == pytest.approx(processed_log_probs(model, request, tokens).tolist(), abs=1e-4)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert all(0.45 * whole < held < 0.6 * whole for held in ranks[0]["held"])
    wait_for(lambda: set(Path("/dev/shm").iterdir()) <= before, "shared memory to be gone")
    assert all("shards of model.layers.0.self_attn.v_proj.weight" in rank["caught"] for rank in ranks)
