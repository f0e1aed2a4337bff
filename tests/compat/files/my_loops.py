"""An agent loop of a project: prepared once for all rows, reading the tree, measuring itself."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput


@register("shouting_agent")
class ShoutingLoop(AgentLoopBase):
    prepared = 0

    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.prepared += 1
        cls.note = config.my_project.note
        cls.response_length = config.actor_rollout_ref.rollout.response_length

    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        assert trainer_config.config.my_project.note == self.config.my_project.note

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs) -> AgentLoopOutput:
        metrics = {}
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            ),
        )
        with simple_timer("generate_sequences", metrics):
            output: TokenOutput = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=None
            )
        ids = output.token_ids[: self.response_length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            multi_modal_data={},
            num_turns=2,
            metrics=AgentLoopMetrics(**metrics),
        )
