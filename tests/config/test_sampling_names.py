"""Sampling parameters of engines, as users write them: one place in the tree, none dropped, none unknown."""

import pytest

from verl.config.rollout import BY_HF, DECIDED, HANDED_ON, OWN
from verl.workers.rollout.assemble import sampling_params

from .helpers import notes, problems, typed

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"


def asked(*words, **how):
    return sampling_params(typed(*words).actor_rollout_ref.rollout, eos_token_id=3, **how)


@pytest.mark.parametrize("mark", ["", "+", "++"])
@pytest.mark.parametrize("prefix", ["", "sampling_kwargs."])
def test_a_field_of_the_engine_is_handed_on_however_it_is_written(mark, prefix):
    words = [f"{mark}{ROLLOUT}.{prefix}frequency_penalty=0.2", f"{mark}{ROLLOUT}.{prefix}logit_bias={{5:-1.5}}"]
    assert asked(*words).extra == {"frequency_penalty": 0.2, "logit_bias": {5: -1.5}}
    assert "old name" not in notes(*words)


def test_every_name_reaches_vllm_and_hf_refuses_those_it_does_not_know():
    words = [f"+{ROLLOUT}.{name}=1" for name in HANDED_ON]
    assert asked(VLLM, *words).extra == dict.fromkeys(HANDED_ON, 1)
    refused = problems(*words)
    assert {name for name in HANDED_ON if f".{name}=1 cannot be handed" in refused} == set(HANDED_ON) - set(BY_HF)


def test_what_verl_decides_is_refused_with_the_way_out():
    names = sorted(DECIDED.keys() - {"seed"})
    refused = problems(VLLM, *(f"+{ROLLOUT}.{name}=1" for name in names))
    assert all(f"{name}=1 cannot be handed to the engine: {DECIDED[name]}" in refused for name in names)


def test_a_parameter_has_one_key():
    refused = problems(VLLM, *(f"{ROLLOUT}.sampling_kwargs.{name}=1" for name in OWN))
    assert all(f".{name}, the key it has of its own" in refused for name in OWN)


def test_a_misspelt_name_is_no_option_and_the_right_one_is_proposed():
    from verl.config.base import ConfigError

    with pytest.raises(ConfigError, match="frequency_penlty is not an option.*did you mean.*frequency_penalty"):
        typed(VLLM, f"+{ROLLOUT}.frequency_penlty=0.2")


def test_two_values_for_one_parameter_disagree():
    words = [f"{ROLLOUT}.presence_penalty=0.2", f"{ROLLOUT}.sampling_kwargs.presence_penalty=0.3"]
    assert "disagree" in problems(*words)


def test_training_asks_for_what_the_section_says():
    got = asked(f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.repetition_penalty=1.2", f"{ROLLOUT}.stop=['</a>','Q: ']",
                f"{ROLLOUT}.stop_token_ids=[7,8]", f"{ROLLOUT}.top_k=0", f"{ROLLOUT}.ignore_eos=true")  # fmt: skip
    assert (got.min_p, got.repetition_penalty, got.stop) == (0.1, 1.2, ("</a>", "Q: "))
    assert (got.stop_token_ids, got.top_k, got.ignore_eos, got.do_sample) == ((3, 7, 8), 0, True, True)
    assert asked(f"{ROLLOUT}.stop=5").stop == ("5",)


def test_validation_follows_training_where_it_says_nothing():
    words = [f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.repetition_penalty=1.2", f"{ROLLOUT}.stop=x",
             f"{ROLLOUT}.stop_token_ids=[7]", f"+{ROLLOUT}.min_tokens=2", f"+{ROLLOUT}.presence_penalty=1"]  # fmt: skip
    got = asked(*words, validate=True)
    assert (got.min_p, got.repetition_penalty, got.stop, got.stop_token_ids) == (0.0, 1.2, ("x",), (3, 7))
    assert got.is_greedy and got.extra == {"min_tokens": 2, "presence_penalty": 1}
    own = [f"{ROLLOUT}.val_kwargs.{word}" for word in ("do_sample=true", "temperature=0.5", "min_p=0.2", "stop=[]",
           "repetition_penalty=1", "stop_token_ids=[]", "min_tokens=null", "presence_penalty=2")]  # fmt: skip
    got = asked(*words, *own, validate=True)
    assert (got.min_p, got.repetition_penalty, got.stop, got.stop_token_ids) == (0.2, 1.0, (), (3,))
    assert not got.is_greedy and got.extra == {"presence_penalty": 2}


def test_fire_is_for_training_and_keeps_to_few_tokens():
    fire = f"{ROLLOUT}.use_fire_sampling=true"
    assert (asked(fire).first_token_temperature, asked(fire).first_token_top_k) == (30.0, 16)
    assert asked(fire, f"{ROLLOUT}.fire_temperature=4").first_token_temperature == 4.0
    assert (asked(fire, f"{ROLLOUT}.top_k=5").first_token_top_k, asked().first_token_temperature) == (-1, None)
    assert asked(fire, validate=True).first_token_temperature is None
