"""GRPO by TRL's GRPOTrainer on the work that a JSON file describes: ``grpo_trl.py WORK.json``"""

import importlib.util
import json
import sys

import marks

marks.start()

from datasets import load_dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Marks(TrainerCallback):
    """A mark when a step's numbers are logged, which is the last thing it does."""

    def __init__(self):
        self.seen = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "completions/mean_length" not in logs:  # the summary at the end
            return
        tokens, self.seen = logs["num_tokens"] - self.seen, logs["num_tokens"]
        marks.mark(
            state.global_step,
            tokens=round(tokens),
            response_tokens=round(logs["completions/mean_length"] * args.generation_batch_size),
            entropy=logs.get("entropy"),
        )


def main():
    with open(sys.argv[1]) as file:
        work = json.load(file)
    spec = importlib.util.spec_from_file_location("reward", work["reward"])
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)

    def scores(completions, **columns):
        return [reward.compute_score("digits", completion[0]["content"], "") for completion in completions]

    config = GRPOConfig(
        output_dir=work["output"],
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["prompts"] * work["n"] // work["micro_batch"],
        num_generations=work["n"],
        max_completion_length=work["new_tokens"],
        generation_kwargs={"min_new_tokens": work["new_tokens"]},
        max_steps=work["steps"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        weight_decay=work["weight_decay"],
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **work.get("trl", {}),
    )
    data = load_dataset("parquet", data_files=work["train"], split="train", cache_dir=work["output"])
    data = data.select_columns(["prompt"])
    trainer = GRPOTrainer(
        model=work["model"], reward_funcs=scores, args=config, train_dataset=data, callbacks=[Marks()]
    )
    trainer.train()


if __name__ == "__main__":
    main()
