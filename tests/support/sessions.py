"""Agents outside against rollout servers that answer with given texts."""

import asyncio
from types import SimpleNamespace

from verl.agents.gateway import close_gateway
from verl.agents.outside_agent import OpenAIAgentLoop
from verl.utils.tiny_model import make_tokenizer
from verl.workers.rollout.base import Completion

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
SAMPLING = {"max_tokens": 900, "temperature": 1.0, "top_p": 1.0, "want_log_probs": True, "stop": (), "extra": {}}


def tokenizer_with_tools():
    """One token a character, and a template that shows tools, calls and results."""
    tokenizer = make_tokenizer("char")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Servers:
    """Rollout servers of one row, which answer with given texts; they keep what was asked and generated."""

    def __init__(self, tokenizer, answers, wait_s=0.0):
        self.tokenizer, self.wait_s = tokenizer, wait_s
        self.answers = answers if callable(answers) else iter(answers).__next__
        self.asked, self.generated, self.sampling = [], [], []
        self.seconds, self.is_stopped = 0.0, False

    async def generate(self, request_id=None, *, prompt_ids, sampling_params, image_data=None):
        number = len(self.asked)
        self.asked.append(list(prompt_ids))
        self.sampling.append(dict(sampling_params))
        await asyncio.sleep(self.wait_s)
        text = self.answers()
        if isinstance(text, BaseException):
            raise text
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= sampling_params["max_tokens"] else "length"
        ids = ids[: sampling_params["max_tokens"]]
        self.generated.append(ids)
        return Completion(ids, [-0.5 - number] * len(ids), reason, 3)


def check_rows(outputs, servers):
    """Every generated token is in the loss exactly once, behind the very tokens that the engine read."""
    found = []
    for output in outputs:
        whole = output.prompt_ids + output.response_ids
        for first, last in output.turn_spans:
            place = len(output.prompt_ids) + first
            found.append((whole[:place], output.response_ids[first:last], output.response_logprobs[first:last]))
        inside = {i for first, last in output.turn_spans for i in range(first, last)}
        assert [int(i in inside) for i in range(len(output.response_ids))] == output.response_mask
    expected = zip(servers.asked, servers.generated, range(len(servers.asked)), strict=True)
    assert sorted(found) == sorted((asked, ids, [-0.5 - n] * len(ids)) for asked, ids, n in expected)


def run_loop(
    tokenizer,
    options=None,
    rows=1,
    timeout=None,
    turns=None,
    answers=("one",) * 20,
    loop_class=OpenAIAgentLoop,
    **agent,
):
    """Outputs of agent loops, one a row, or the errors they raised."""
    multi_turn = SimpleNamespace(
        use_inference_chat_template=False, tokenization_sanity_check_mode="strict", format="hermes",
        max_assistant_turns=turns, max_user_turns=None, max_tool_calls=None, max_tokens_per_turn=None,
    )  # fmt: skip
    agent = SimpleNamespace(
        openai_agent=SimpleNamespace(**{"function": None, "command": None, "runs_in": "auto"} | agent)
    )
    rollout = SimpleNamespace(
        multi_turn=multi_turn, agent=agent, prompt_length=300, server_host="127.0.0.1", partial_rollout=False
    )
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        data=SimpleNamespace(apply_chat_template_kwargs={}),
        env=SimpleNamespace(episode_timeout=timeout, memory_mb=None),
    )

    async def one(index):
        servers = Servers(tokenizer, answers)
        row = {"raw_prompt": HELLO, "raw_prompt_ids": tokenizer.encode("Hello"), "index": index}
        loop = loop_class(config, servers, tokenizer, **(options or {}))
        output = await loop.run(dict(SAMPLING), **row)
        check_rows(output if isinstance(output, list) else [output], servers)
        return output

    async def work():
        try:
            return await asyncio.gather(*map(one, range(rows)), return_exceptions=True)
        finally:
            await close_gateway()

    outputs = asyncio.run(work())
    return outputs[0] if rows == 1 else outputs
