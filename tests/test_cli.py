"""The command ``verl``: its words, what an unknown one gets, and the completion of shells."""

import re
import shutil
import subprocess
import sys

import pytest

from verl.cli import COMMANDS, main
from verl.config.command_line import bash_script, key_words, value_words


def verl(*words):
    return subprocess.run([sys.executable, "-m", "verl", *words], capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_imports_nothing_heavy():
    program = (
        "import sys; from verl.cli import main; main(['--help']);"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'ray', 'transformers'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert shown.stdout.splitlines()[-1] == "[]", shown.stderr
    assert all(f"\n  {name} " in shown.stdout for name in COMMANDS)


def test_an_unknown_command_is_named_with_the_nearest_and_the_list(capsys):
    assert main(["rol"]) == 2
    text = capsys.readouterr().err
    assert "rol is no command of verl; did you mean 'roll'?" in text and "doctor" in text
    assert main([]) == 2


def test_ppo_is_the_main_job():
    shown = verl("ppo", "trainer.sav_freq=3")
    assert shown.returncode == 2 and "did you mean 'trainer.save_freq'" in shown.stderr


def test_version_and_help_of_commands(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out[0].isdigit()
    assert main(["roll", "--help"]) == 0 and "CONFIG.yaml" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["merge", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: verl merge [") and "merge merge" not in shown


def complete(line):
    """What bash offers behind ``line``."""
    program = f"""
{bash_script({name: command.about for name, command in COMMANDS.items()})}
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _verl; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    shown = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30)
    assert not shown.stderr, shown.stderr
    return shown.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("verl ro", ["roll"]),
        ("verl ppo trainer.save_", ["trainer.save_freq="]),
        ("verl ppo trainer.seed=3 trainer.resume_mode=d", ["disable"]),
        ("verl ppo actor_rollout_ref.rollout.name=", ["hf", "vllm", "sglang"]),
        ("verl doctor algorithm.use_kl_in", ["algorithm.use_kl_in_reward="]),
        ("verl config --ex", ["--explain"]),
        ("verl completion z", ["zsh"]),
    ],
)
def test_bash_completes(line, offered):
    assert complete(line) == offered


def test_zsh_takes_the_script(tmp_path):
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    (tmp_path / "_verl").write_text(verl("completion", "zsh").stdout)
    subprocess.run(["zsh", "-n", str(tmp_path / "_verl")], check=True)


def test_every_option_and_every_choice_can_be_completed():
    assert "trainer.seed=" in key_words() and "actor_rollout_ref.rollout.engine_kwargs=" in key_words()
    values = value_words()
    assert {"trainer.balance_batch=true", "algorithm.adv_estimator=grpo", "critic.enable=null"} <= set(values)
    assert main(["completion", "fish"]) == 2


@pytest.mark.parametrize("command", ["ppo", "doctor", "check", "config", "roll", "trajectories"])
def test_every_flag_of_a_help_text_can_be_completed(command):
    line = next(line for line in bash_script({}).splitlines() if line.strip().startswith(f"{command}) choices="))
    shown = set(re.findall(r"(?<![\w-])--[a-z-]+(?=[ \],\n|]|$)", verl(command, "--help").stdout))
    assert shown and shown - {"--explain"} <= {*line.split("'")[1].split()}  # of verl config, named by verl ppo
