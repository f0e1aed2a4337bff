"""Runs with several turns a trajectory: what is trained on is what the policy read and generated."""

import pytest

from tests.agents.conftest import ROLLOUT
from tests.trainer.test_images import run as run_with_images
from tests.trainer.test_images import task as images  # noqa: F401 - a fixture

LOOP = '''
from verl.agents.base import register
from verl.agents.episode import ConversationEnvironment, EpisodeLoop, Reply


class Asks(ConversationEnvironment):
    """Asks three times; the answers are worth their digits."""

    async def reply(self, turn):
        reward = sum(char.isdigit() for char in turn.text) / 4
        if turn.number == 2:
            return Reply(reward=reward, terminated=True)
        return Reply([{"role": "user", "content": f"again {turn.number}"}], reward=reward)

    async def finish(self):
        return {"reward_score": 0.25}


@register("asks_again")
class AsksAgain(EpisodeLoop):
    def environment(self, row):
        return Asks()
'''
LAST_THREE = (  # messages only: what came before is forgotten
    "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    return {
        f"{ROLLOUT}__agent__agent_loop_config_path": str(tmp_path / "loop.py"),
        f"{ROLLOUT}__agent__default_agent_loop": "asks_again",
        f"{ROLLOUT}__multi_turn__enable": True,
        f"{ROLLOUT}__multi_turn__max_tokens_per_turn": 4,
        f"{ROLLOUT}__calculate_log_probs": True,
        "data__return_raw_chat": True,
        "data__max_prompt_length": 96,
        "data__max_response_length": 128,
    }


def settings(tmp_path, **changes):
    (tmp_path / "template.jinja").write_text(LAST_THREE)
    template = {"actor_rollout_ref__model__custom_chat_template": str(tmp_path / "template.jinja")}
    return {
        **{key: value for key, value in turns(tmp_path).items() if not key.endswith("__mode")},
        **template,
        **changes,
    }


def test_the_actor_scores_each_row_where_it_was_generated(run, tmp_path, capsys):
    use = {f"{ROLLOUT}__multi_turn__use_inference_chat_template": True}
    _, steps = run(**settings(tmp_path, **use))
    printed = capsys.readouterr().out
    assert "template not append-only: with messages, in the prompt of turn 2" in printed
    [worst] = [line for line in printed.splitlines() if "rollout_probs_diff_max" in line][-1:]
    assert float(worst.split("rollout_probs_diff_max:")[1].split()[0]) < 1e-4
    kept = 0
    for row in [row for rows in steps for row in rows]:
        places = [turn["row"] for turn in row["turns"] if turn["generated"]]
        # two turns share a row unless the first has a special token, which no message keeps; the third has its own
        assert places in ([0, 0, 1], [0, 1, 2]) and row["num_rows"] == places[-1] + 1
        kept += places == [0, 0, 1]
        digits = sum(char.isdigit() for turn in row["turns"] if turn["generated"] for char in turn["text"])
        assert row["score"] == pytest.approx(0.25 + digits / 4)
    assert kept > 16


def test_a_template_that_rewrites_is_refused_by_strict_before_anything_is_generated(run, tmp_path):
    with pytest.raises(Exception, match="does not permit this chat template: with messages, in the prompt of turn 2"):
        run(**settings(tmp_path))


def test_images_of_the_prompt_are_seen_at_every_turn(images, tmp_path):  # noqa: F811
    """Rollout and actor agree on every token of three turns, which they would not if one did not see the images."""
    lengths = run_with_images(
        images,
        tmp_path,
        "response_length/mean",
        **turns(tmp_path),
        **{
            f"{ROLLOUT}__mode": "async",
            f"{ROLLOUT}__ignore_eos": False,
            "data__train_batch_size": 4,
            "trainer__total_training_steps": 1,
        },
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
    )
    assert lengths[0] > 20
