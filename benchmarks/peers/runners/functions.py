"""Functions of the driver and the loss by their public names, here and in verl 0.5 alike: ``functions.py OUTPUT.json``

One thread, CPU milliseconds, the least of several calls; the batch is made from a seed, and sums of the results tell
whether both sides computed the same.
"""

import json
import sys
import time
from functools import partial

import numpy as np
import torch

ROWS, WIDTH, GROUP = 1024, 4096, 8
MEAN_LENGTH = 560
"""Log-normal lengths about it: 0.7 million tokens in a window of 4.2 million."""
VOCABULARY, HIDDEN, SCORED = 49152, 576, 1024
REPEAT = 7


def least(call, clock=time.process_time, repeat=REPEAT):
    """Return the least milliseconds of ``repeat`` calls after one that warms up."""
    costs = []
    for _ in range(repeat + 1):
        start = clock()
        call()
        costs.append((clock() - start) * 1000)
    return min(costs[1:])


def make_batch(seed=0):
    random = np.random.RandomState(seed)  # its streams are the same in every version of numpy
    lengths = random.lognormal(np.log(MEAN_LENGTH), 0.7, ROWS).astype(int).clip(1, WIDTH)
    mask = torch.as_tensor(np.arange(WIDTH) < lengths[:, None]).long()
    columns = {}
    for name in ("rewards", "values", "advantages", "old"):
        columns[name] = torch.as_tensor(random.standard_normal((ROWS, WIDTH)).astype(np.float32)) * mask
    columns["old"] = -columns["old"].abs()
    return mask, columns


def algorithms(results):
    from verl.trainer.ppo import core_algos

    mask, columns = make_batch()
    work = {"rows": ROWS, "width": WIDTH, "tokens": int(mask.sum())}
    index = np.repeat([f"prompt-{i}" for i in range(ROWS // GROUP)], GROUP).astype(object)
    outcome = torch.zeros_like(columns["rewards"])
    outcome[torch.arange(ROWS), mask.sum(1) - 1] = columns["rewards"][:, 0]
    new = (columns["old"] + 0.1 * columns["values"]).clamp(max=-1e-3).requires_grad_(True)

    def gae():
        return core_algos.compute_gae_advantage_return(outcome, columns["values"], mask, 1.0, 0.95)[0]

    def grpo():
        return core_algos.compute_grpo_outcome_advantage(outcome, mask, index)[0]

    def policy_loss():
        new.grad = None
        loss = core_algos.compute_policy_loss(columns["old"], new, columns["advantages"], mask, 0.2)[0]
        loss.backward()
        return loss

    flat = without_padding(mask, columns, index, new)
    for name, call in (("GAE", gae), ("GRPO advantages", grpo), ("policy loss and its gradient", policy_loss)):
        value = call().detach()
        results.append({"what": name, "work": work, "cpu_ms": least(call), "check": float((value * mask).abs().sum())})
        if name in flat:
            found = flat[name]()
            value = (found if isinstance(found, torch.Tensor) else found.values).detach()
            row = {"what": f"{name}, as a run calls it", "of": name, "work": work}
            check = float((value * mask[mask != 0]).abs().sum())
            results.append({**row, "cpu_ms": least(flat[name]), "check": check})


def without_padding(mask, columns, index, padded):
    """Return the functions on valid tokens alone, by the names of their public forms; none in verl 0.5."""
    try:
        from verl.batch.layout import Layout
        from verl.batch.ragged import Ragged, RowValues
    except ImportError:
        return {}
    from verl.algorithms.advantages import get_adv_estimator_fn
    from verl.algorithms.losses import compute_policy_loss

    layout = Layout.from_mask(mask)
    names = ("values", "advantages", "old")
    values, advantages, old = (Ragged.from_padded(columns[name], layout) for name in names)
    own = Ragged.from_padded(mask, layout)
    rewards = RowValues.on_last_tokens(columns["rewards"][:, 0].clone(), layout)
    new = Ragged.from_padded(padded.detach(), layout).values.clone().requires_grad_(True)

    def gae():
        return get_adv_estimator_fn("gae")(rewards, values, own, 1.0, 0.95)[0]

    def grpo():
        return get_adv_estimator_fn("grpo")(rewards, own, index)[0]

    def policy_loss():
        new.grad = None
        loss = compute_policy_loss(old, new, advantages, own, 0.2)[0]
        loss.backward()
        return loss

    return {"GAE": gae, "GRPO advantages": grpo, "policy loss and its gradient": policy_loss}


def log_probs(results):
    """From hidden states to log-probs, entropy and their gradients: what ends the model's forward pass."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(SCORED, HIDDEN, generator=g).requires_grad_(True)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=g) * 0.05).requires_grad_(True)
    labels = torch.randint(VOCABULARY, (SCORED,), generator=g)
    try:
        from verl.models.token_outputs import chunked_log_probs
    except ImportError:
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

        def score():
            logits = hidden @ weight.t()
            return logprobs_from_logits(logits, labels, inplace_backward=False), entropy_from_logits(logits)
    else:

        def score():
            return chunked_log_probs(hidden, weight, labels, want_entropy=True)

    def with_gradients():
        hidden.grad = weight.grad = None
        scores, entropy = score()
        (scores.sum() + 0.1 * entropy.sum()).backward()
        return scores

    @torch.no_grad()
    def without():
        return score()[0]

    @torch.no_grad()
    def products(want_gradients):
        """The matrix products that no way can do without: one, and two more for the gradients."""
        logits = hidden @ weight.t()
        return (logits @ weight, logits.t() @ hidden) if want_gradients else logits

    work = {"rows": SCORED, "hidden": HIDDEN, "vocabulary": VOCABULARY}
    for words, call in (("", without), (", with gradients", with_gradients)):
        row = {"what": f"log-probs and entropy of hidden states{words}", "work": work}
        costs = {
            "cpu_ms": least(call, repeat=3),
            "products_cpu_ms": least(partial(products, call is with_gradients), repeat=3),
        }
        results.append({**row, **costs, "check": float(call().detach().sum())})


def rewards(results):
    from transformers import PreTrainedTokenizerFast

    from verl import DataProto
    from verl.workers.reward_manager import NaiveRewardManager

    random = np.random.RandomState(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[2])
    prompt, response, rows = 64, 256, 1024
    texts = [
        "so the sum of these numbers is "
        + "and then again " * random.randint(1, 10)
        + f"so #### {random.randint(0, 9)}"
        for _ in range(rows)
    ]
    ids = torch.zeros(rows, response, dtype=torch.long)
    mask = torch.zeros(rows, prompt + response, dtype=torch.long)
    mask[:, :prompt] = 1
    for i, text in enumerate(texts):
        tokens = tokenizer(text)["input_ids"][-response:]
        ids[i, : len(tokens)] = torch.as_tensor(tokens)
        mask[i, prompt : prompt + len(tokens)] = 1
    batch = DataProto.from_dict(
        {
            "prompts": torch.full((rows, prompt), 20),
            "responses": ids,
            "attention_mask": mask,
            "input_ids": torch.cat([torch.full((rows, prompt), 20), ids], 1),
        },
        {
            "data_source": np.array(["openai/gsm8k"] * rows, dtype=object),
            "reward_model": np.array(
                [{"style": "rule", "ground_truth": str(i % 10)} for i in range(rows)], dtype=object
            ),
            "extra_info": np.array([{} for _ in range(rows)], dtype=object),
        },
    )
    manager = NaiveRewardManager(tokenizer, 0)
    work = {"rows": rows, "tokens": int(mask[:, prompt:].sum())}
    value = manager(batch)
    row = {"what": "GSM8K rewards by the naive manager", "work": work}
    results.append({**row, "cpu_ms": least(lambda: manager(batch)), "check": float(value.sum())})


def dispatch(results):
    """A batch to two Ray workers and a column back: milliseconds of the clock."""
    import ray
    from echo import EchoWorker

    from verl import DataProto
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    mask, columns = make_batch()
    prompt = 256
    ids = torch.randint(5, 90, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0)) * mask
    attention = torch.cat([torch.ones(ROWS, prompt, dtype=torch.long), mask], 1)
    tensors = {
        "input_ids": torch.cat([torch.full((ROWS, prompt), 20), ids], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids,
        "response_mask": mask,
        "old_log_probs": columns["old"],
        "advantages": columns["advantages"],
    }
    batch = DataProto.from_dict(tensors)
    if hasattr(batch, "packed"):
        batch = batch.packed()  # as its rollouts make it
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    try:
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(EchoWorker)), device_name="cpu")
        value = float(group.score(batch).batch["old_log_probs"].sum())
        cost = least(lambda: group.score(batch), time.perf_counter, repeat=15)
    finally:
        ray.shutdown()
    work = {"rows": ROWS, "width": WIDTH, "tokens": int(attention.sum()), "ranks": 2}
    results.append({"what": "a batch to two Ray workers and back", "work": work, "wall_ms": cost, "check": value})


def main():
    torch.set_num_threads(1)
    results = []
    for part in (algorithms, log_probs, rewards, dispatch):
        part(results)
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
