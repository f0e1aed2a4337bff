"""Folders as runs leave them, small and made here."""

import json

import pytest

EVIL = '<script>window.evil = 1</script><img src=x onerror="window.evil = 1">\'&</pre></script><!--'


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tokens(words, advantage):
    return {
        "text": words,
        "log_probs": [-0.1 - i for i in range(len(words))],
        "rollout_log_probs": [-0.2 - i for i in range(len(words))],
        "advantages": [advantage] * len(words),
        "mask": [1] * len(words),
    }


def sample(step, uid, prompt, output, score, **more):
    row = {"input": prompt, "output": output, "gts": "4", "score": score, "step": step, "uid": uid}
    return row | {"data_source": "sums", "response_length": len(output.split()), "finish_reason": "stop"} | more


def conversation(step):
    turns = [
        {"role": "assistant", "text": "look up 2 + 2", "generated": True, "span": [0, 2], "reward": 0.0, "row": 0},
        {"role": "tool", "text": f"four {EVIL}", "generated": False, "span": [2, 3]},
        {"role": "assistant", "text": "it is four", "generated": True, "span": [3, 5], "reward": 1.0},
    ]
    own = tokens(["look ", "up", "four", "it is ", "four"], 0.5) | {"mask": [1, 1, 0, 1, 1]}
    calls = [{"name": "lookup", "outcome": "ok", "seconds": 0.25}]
    status = {"status": "completed", "env_tag": "Lookup", "data_source": "tools"}
    return sample(step, "talk", "ask a tool", "...", 1.0, turns=turns, tool_calls=calls, tokens=own, **status)


def make_run(folder, steps=3, lr=0.001, reward=0.5):
    folder.mkdir(parents=True)
    config = {"trainer": {"default_local_dir": str(folder), "total_training_steps": 5, "wandb_token": "secretsecret"}}
    config |= {"actor_rollout_ref": {"model": {"path": "models/m"}, "actor": {"optim": {"lr": lr}}}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "command.sh").write_text("#!/usr/bin/env bash\nexec python -m verl.trainer.main_ppo\n")
    numbers = []
    for step in range(steps + 1):
        data = {"critic/score/mean": reward + step / 10, "actor/entropy": 2.0 - step / 10}
        data |= {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 3.1} if step else {}
        data |= {"val-core/sums/reward/mean@1": step / steps} if step in (0, steps) else {}
        numbers.append({"step": step, "data": data})
    write_lines(folder / "metrics.jsonl", numbers)
    (folder / "run.log").write_text(
        "== 2026-01-01, process 1 on host: python\nverl: reading\nWARNING:verl: no flash attention\n"
        + "step 2: in 5 of the last 5 steps every reward was equal\n" * 2
        + f"Done: {steps} steps in 3 s.\n"
    )
    for step in range(1, steps + 1):
        group = [
            sample(step, f"step{step}-0", "What is 2 + 2?", f"answer {i} {EVIL if i == 0 else ''}", float(i % 2),
                   advantage=i - 0.5, tokens=tokens(["answer", f" {i}"], i - 0.5))
            for i in range(4)
        ]  # fmt: skip
        write_lines(folder / "samples" / f"{step}.jsonl", [*group, conversation(step)])
    for step in (0, steps):
        rows = [sample(step, f"val-{i}", f"question {i}", f"guess {step}", float(step > 0 and i < 2)) for i in range(3)]
        write_lines(folder / "validation" / f"{step}.jsonl", rows)
    return folder


@pytest.fixture
def run_folder(tmp_path):
    return make_run(tmp_path / "first")


@pytest.fixture
def run_folders(tmp_path):
    return [make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "two", lr=0.01, reward=0.2)]
