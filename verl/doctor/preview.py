"""Data and reward, tried before the run: what ``verl.data_check`` says of the first rows, in the doctor's words.

Loads neither torch nor transformers, and asks no judge and no hub: what needs those is left to
``python -m verl.data_check``.
"""

from verl.config.ppo import PPOConfig
from verl.data_check.preview import Limits, preview
from verl.data_check.preview import Preview as Seen
from verl.doctor.report import Finding, wrapped
from verl.utils.py_functional import excerpt
from verl.utils.reward_functions.trial import Trial, mean

_ROWS = 512
_LIMITS = {"prompts": 3, "tokens": _ROWS, "patience": 2.0, "rows": _ROWS, "is_light": True}
_BAR = 40


def first_rows(config: PPOConfig, files: list[str], is_scored: bool) -> tuple[list[str], list[Finding]]:
    """Lines for people, and what is wrong or doubtful.

    What concerns rows and no option is said in the lines, but for errors.

    Args:
        files: those of ``data.train_files`` and ``data.val_files`` that can be read here.
        is_scored: whether to call the reward function.
    """
    seen = preview(config, files, Limits(scored=4 if is_scored else 0, **_LIMITS))
    lines = [f"  prompt  {excerpt(prompt.text, 160)}" for prompt in seen.prompts]
    lines += _lengths(seen, config.data.max_prompt_length)
    lines += [_reward(trial) for trial in seen.scores if not trial.error]
    findings = []
    for found in seen.findings:
        if found.level == "error" or found.level == "warning" and found.keys:
            keys = found.keys or ("data.train_files",)
            key = "" if any(one in found.text for one in keys) else f"{keys[0]}: "
            findings.append(Finding(found.level, f"{key}{found.text}", keys))
        else:
            lines.append(wrapped("  note    ", found.text))
    return lines, findings


def _lengths(seen: Seen, limit: int) -> list[str]:
    """A histogram."""
    lengths = seen.lengths
    if lengths is None:
        return []
    tallest = max(count for *_, count in lengths.histogram)
    head = f"  {lengths.unit} of {lengths.counted} prompts, the first of each file (data.max_prompt_length={limit})"
    return [head] + [
        f"  {start:>6} to {end - 1:<6} {'#' * max(1, _BAR * count // tallest)} {count}"
        for start, end, count in lengths.histogram
        if count
    ]


def _reward(trial: Trial) -> str:
    if not trial.gold:
        return f"  reward  {trial.data_source}: {mean(trial.garbage):g} for garbage; the rows do not say what is right"
    right = f"{mean(trial.gold):g} for right answers, written as {trial.form!r}"
    return f"  reward  {trial.data_source}: {right}; {mean(trial.garbage):g} for garbage"
