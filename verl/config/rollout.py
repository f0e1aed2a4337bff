"""Options of generation: sampling parameters, and the rollout engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from verl.batch import MicroBatching
from verl.config.base import Config, ReadIf, option, read_if, section
from verl.config.profiler import FollowingProfilerConfig

_SERVED = read_if("actor_rollout_ref.rollout.mode", "async", remark="samples a batch in one call, without servers")
_CONVERSES = read_if(
    "actor_rollout_ref.rollout.mode", "async", remark="generates one turn; set multi_turn.enable=true for more"
)
_STOPS = read_if("actor_rollout_ref.rollout.ignore_eos", "false", remark="goes on after any token")


@dataclass
class SamplingConfig(Config):
    """Sampling of validation responses."""

    top_k: int = option(-1, at_least=-1)
    """Draw from the k likeliest tokens. -1 or 0: from all."""

    top_p: float = option(1.0, above=0, at_most=1)
    """Draw from the likeliest tokens that together reach this probability. Source: Holtzman et al. 2020
    (arXiv:1904.09751)."""

    temperature: float = option(0, at_least=0)
    """Logits are divided by this. 0: the likeliest token."""

    n: int = option(1, above=0)
    """Responses per prompt."""

    do_sample: bool = False
    """Draw at random. False: always the likeliest token."""

    min_p: float = option(0.0, at_least=0, at_most=1)
    """Leave out tokens less likely than this share of the likeliest one's probability. Source: Nguyen et al. 2024
    (arXiv:2407.01082)."""

    repetition_penalty: float | None = option(None, above=0)
    """As ``rollout.repetition_penalty``, which null follows."""

    stop: list[str] | str | None = None
    """As ``rollout.stop``, which null follows."""

    stop_token_ids: list[int] | None = option(None, _STOPS)
    """As ``rollout.stop_token_ids``, which null follows."""

    sampling_kwargs: dict[str, Any] = option({})
    """Free-form: entries laid over those of ``rollout.sampling_kwargs``; null takes one away."""


@dataclass
class MultiTurnConfig(Config):
    """Conversations of several turns, with tools or a simulated user; limits of all agent loops."""

    _read_if: ClassVar[ReadIf] = _CONVERSES

    enable: bool = False
    """Hold conversations of several turns: sets ``rollout.mode=async``, and rows without ``agent_name`` are generated
    by ``tool_agent`` where tools are named, else by ``interaction_agent``. False: only rows with such an
    ``agent_name``."""

    max_assistant_turns: int | None = option(None, above=0)
    """Turns of the model at most."""

    tool_config_path: str | None = None
    """YAML file with the tools: ``tools: [{class_name, config, tool_schema}]``."""

    max_user_turns: int | None = option(None, above=0)
    """Answers to the model at most: of a user, an environment, or the tools that a turn calls."""

    max_parallel_calls: int = option(1, above=0)
    """Tool calls of one turn that are answered; the others get an answer that says so."""

    max_tool_calls: int | None = option(None, above=0)
    """Tool calls of a conversation at most."""

    max_tokens_per_turn: int | None = option(None, above=0)
    """Tokens of one turn of the model at most. Null: what is left of the response window."""

    tool_timeout: float = option(60.0, above=0)
    """Seconds in which a tool must answer."""

    function_tool_path: str | None = None
    """Python file with functions marked as tools by ``verl.tools.function_tool``."""

    tool_num_workers: int = option(8, at_least=0)
    """Processes at most in which the functions of ``function_tool_path`` run, each one call at a time; they are started
    as calls need them, and ended when a call hangs. 0: threads of the driver, where a hung call is abandoned and cannot
    be ended. ``async def`` functions and classes run in the driver."""

    tool_memory_mb: int | None = option(4096, above=0)
    """MiB that one such process may hold. Null: no limit."""

    max_tool_response_length: int = option(256, above=0)
    """Characters of a tool's answer kept."""

    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Part of a longer answer that is kept: its head (``left``), its tail (``right``), or both ends."""

    interaction_config_path: str | None = None
    """YAML file with the simulated users: ``interaction: [{name, class_name, config}]``; a row's
    ``extra_info.interaction_kwargs.name`` chooses one."""

    use_inference_chat_template: bool = False
    """At each turn the policy reads what the chat template renders of all messages, as in inference, and where that is
    not the tokens as generated (reasoning dropped) a new training row of the trajectory begins. False: it reads the
    tokens as generated, and a trajectory is one row. See docs/token_rules.md."""

    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Differences between the tokens of a conversation and the chat template's rendering of it that are permitted; read
    once at the start. ``strict``: those by design of the template, such as reasoning dropped; ``ignore_strippable``:
    those of whitespace too; ``disable``: all, and tools that the template does not show."""

    format: str = "hermes"
    """Format of the model's tool calls: ``hermes`` (or ``qwen``: Qwen2.5, Qwen3), ``llama3_json``, ``qwen3_coder``
    (and Qwen3.5), ``glm``, ``gpt-oss``, ``mistral``; one of yours by its registered name, or as FILE.py:CLASS."""


@dataclass
class AsyncServerConfig(Config):
    """A server class of the user's."""

    _read_if: ClassVar[ReadIf] = _SERVED

    path: str | None = None
    """Python file that defines it."""

    name: str | None = None
    """Name of the class in that file."""


@dataclass
class OpenAIAgentConfig(Config):
    """An agent written outside, which speaks OpenAI's chat completions: that of the rows whose ``agent_name`` is
    ``openai_agent``. See docs/outside_agents.md."""

    _read_if: ClassVar[ReadIf] = _SERVED

    function: str | None = None
    """``path/file.py:function`` or ``pkg://module:function``, called with ``(base_url, api_key, row)`` once an episode.
    Returns the reward, a mapping with ``reward`` and further numbers, or nothing."""

    runs_in: Literal["auto", "driver", "thread", "process"] = option("auto", read_if("function"))
    """Place of its calls: ``driver``, the event loop that all agent loops share, for ``async`` functions that never
    block; a ``thread`` of its own, which cannot be killed; or a ``process`` of its own, which is killed at
    ``env.episode_timeout`` and at ``env.memory_mb``. ``auto``: ``driver`` for ``async`` functions, else ``thread``."""

    command: list[str] | None = None
    """A program and its arguments in the function's place, started once an episode. It reads the row as JSON from its
    standard input, and ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``VERL_REWARD_URL`` from its environment."""


@dataclass
class AgentConfig(Config):
    """Agent loops."""

    _read_if: ClassVar[ReadIf] = _SERVED

    num_workers: int = option(1, above=0)
    """Processes of agent loops; 1: they run in an event loop of the driver."""

    default_agent_loop: str = "single_turn_agent"
    """Agent loop of the rows that have no ``agent_name``. Unless given: ``openai_agent`` where one is named in
    ``agent.openai_agent``; with ``multi_turn.enable`` ``tool_agent`` or ``interaction_agent``, by the tools and users
    that are named."""

    agent_loop_config_path: str | None = None
    """Your agent loops: a Python file that registers them, or a YAML list of ``{name, _target_, ...}``, where
    ``_target_`` is a dotted class, or the name of one in the Python file that ``path`` names."""

    openai_agent: OpenAIAgentConfig = section(OpenAIAgentConfig)
    """An agent written outside."""

    custom_async_server: AsyncServerConfig = section(AsyncServerConfig)
    """A server class of yours, derived from ``verl.workers.rollout.server.server.RolloutServer``."""


@dataclass
class TraceConfig(Config):
    """Recording of every sample: its tokens, rewards, finish reason, version of the weights."""

    backend: Literal["file", "mlflow", "weave"] | None = None
    """Place of the record: ``file`` (JSON lines), ``mlflow`` or ``weave`` (both to be installed). Null: nowhere."""

    token2text: bool = option(False, read_if("backend", remark="does not read it"))
    """Record text next to token ids."""

    dir: str | None = option(None, read_if("backend", "file", remark="does not read it"))
    """Folder of the ``file`` backend, one file a step. Null: ``rollout_trace`` in ``trainer.default_local_dir``."""


@dataclass
class RolloutConfig(Config):
    """Sampling of training responses."""

    name: str = "vllm"
    """Engine: ``vllm``, ``sglang`` (install them with scripts/install_engines.sh) or ``hf`` (transformers, nothing to
    install)."""

    mode: Literal["sync", "async"] = "sync"
    """``sync``: one call samples a whole batch. ``async``: every engine is behind a server, which takes requests one by
    one, from agent loops in the driver and from outside. See docs/async.md."""

    server_host: str = option("127.0.0.1", _SERVED)
    """Address the servers of ``mode=async`` listen on; with several nodes ``0.0.0.0``, all addresses, unless given.
    Others than loopback let other machines in. All need the key of the run, in
    ``trainer.default_local_dir``/rollout_servers.json."""

    nnodes: int = option(1, at_least=0)
    """Machines of the rollout. Read only with ``hybrid_engine=false``."""

    n_gpus_per_node: int | None = option(None, above=0)
    """Worker processes of the rollout on each of its machines, one per GPU, apart from those of ``trainer``. Null: as
    many as ``trainer.n_gpus_per_node``. Read only with ``hybrid_engine=false``."""

    temperature: float = option(1.0, above=0)
    """Logits are divided by this, when sampling and when log-probs are computed."""

    top_k: int = option(-1, at_least=-1)
    """Draw from the k likeliest tokens. -1 or 0: from all."""

    top_p: float = option(1, above=0, at_most=1)
    """Draw from the likeliest tokens that together reach this probability."""

    min_p: float = option(0.0, at_least=0, at_most=1)
    """Leave out tokens less likely than this share of the likeliest one's probability. 0: none. Comes before top_k and
    top_p. Source: Nguyen et al. 2024 (arXiv:2407.01082)."""

    repetition_penalty: float = option(1.0, above=0)
    """Logits of tokens that stand in the prompt or response already are divided by it if positive, else multiplied.
    1: none. Source: Keskar et al. 2019, CTRL (arXiv:1909.05858)."""

    stop: list[str] | str = option([])
    """Texts that end a response as soon as it holds one of them; the tokens that complete the text stay in it. Special
    tokens count as text."""

    stop_token_ids: list[int] = option([], _STOPS)
    """Tokens that end a response, besides the model's and the tokenizer's end of sequence."""

    sampling_kwargs: dict[str, Any] = option({})
    """Free-form: further sampling parameters by the engine's own names (``frequency_penalty``, ``logit_bias``,
    ``bad_words``, ...), which may also stand directly under ``rollout``. An engine refuses a name it does not have."""

    prompt_length: int = option(512, above=0)
    """Tokens of the prompt window; follows ``data.max_prompt_length``."""

    response_length: int = option(512, above=0)
    """Tokens of the response window; follows ``data.max_response_length``."""

    dtype: Literal["bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "half", "float", "auto"] = "bfloat16"
    """Number format of the rollout's copy of the weights."""

    gpu_memory_utilization: float = option(0.5, above=0, at_most=1)
    """Share of GPU memory for the engine's weights and cache. With ``hf``: for the cache alone, which bounds how many
    responses are generated at a time. On CPU: half of this share of the machine's memory, divided among its workers,
    for the cache."""

    ignore_eos: bool = False
    """Sample to the full length, past end-of-sequence tokens."""

    enforce_eager: bool = False
    """Run without CUDA graphs: slower, and some memory less. No effect with ``hf`` and on CPU, which has none."""

    free_cache_engine: bool = True
    """Free the engine's weights and cache while the actor trains."""

    # verl's default, also for engines that cannot share a model: one that is not given is not held against them
    tensor_model_parallel_size: int = option(2, above=0)
    """GPUs that share one copy of the engine. No effect with ``hf``."""

    max_num_batched_tokens: int = option(8192, above=0)
    """Tokens the engine handles in one forward."""

    max_model_len: int | None = option(None, above=0)
    """Tokens of prompt and response together at most. Null: their sum. No effect with ``hf``, which needs no more."""

    max_num_seqs: int = option(1024, above=0)
    """Responses the engine generates at a time (running batch)."""

    log_prob_micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward of the old log-probs, summed over all ranks. Becomes the option below and
    is null afterwards."""

    log_prob_micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward of the old log-probs on one device."""

    log_prob_use_dynamic_bsz: bool = False
    """Cut those forwards by tokens instead; follows ``actor.use_dynamic_bsz``."""

    log_prob_max_token_len_per_gpu: int = option(16384, above=0)
    """Tokens of such a forward on one device; follows ``actor.ppo_max_token_len_per_gpu``."""

    disable_log_stats: bool = True
    """Keep no statistics in the engine. False: its counters become metrics ``rollout/engine/*`` too. No effect with
    ``hf``."""

    do_sample: bool = True
    """Draw at random. False: always the likeliest token."""

    n: int = option(1, above=0)
    """Responses per prompt: the group size of GRPO and RLOO."""

    multi_stage_wake_up: bool = option(False, never_read="weights are always brought back first, the cache later")
    """Bring back weights first and the cache later when switching from training to sampling: always done."""

    engine_kwargs: dict[str, dict[str, Any] | None] = option(
        {
            "vllm": {"swap_space": None, "disable_mm_preprocessor_cache": False},
            "sglang": {"attention_backend": None},
        }
    )
    """Free-form: ``engine_kwargs.<engine>.<argument>`` is handed to that engine untouched (null: not at all), for
    example vllm.swap_space (GiB of host memory), vllm.disable_mm_preprocessor_cache, sglang.attention_backend
    (flashinfer, triton, flashmla)."""

    val_kwargs: SamplingConfig = section(SamplingConfig)
    """Sampling of validation responses."""

    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    """Conversations of several turns."""

    calculate_log_probs: bool = False
    """Keep the log-probs the engine sampled with, and compare them with the actor's at every step."""

    mismatch_threshold: float = option(
        0.01,
        read_if("calculate_log_probs", remark="keeps no probabilities to compare"),
        read_if(
            "algorithm.rollout_correction.bypass_mode", "false", remark="computes no probabilities to compare with"
        ),
        at_least=0,
    )
    """Mean difference between the engine's and the actor's probability of a token above which the run warns, and
    writes down the worst tokens. Read only with ``calculate_log_probs``. What can be done about it:
    ``algorithm.rollout_correction``."""

    canary_prompts: int = option(4, at_least=0, at_most=8)
    """Short prompts whose next token the engine generates after every sync of weights, and the actor scores before its
    next update: an engine that computes with other weights than it was sent ends the run. 0: none."""

    canary_tolerance: float | None = option(None, read_if("canary_prompts", remark="compares nothing"), above=0)
    """Mean difference of log-probabilities allowed between the two. Null: three times what rounding explains, by type,
    layers and vocabulary (bfloat16, 28 layers, 150,000 tokens: 0.35), and 0.002 in float32."""

    stall_timeout_s: float = option(1800, at_least=0)
    """Seconds in which an engine that generates must finish a step (about a token of every running response), or its
    process is ended with all stacks and the last requests. 0: no limit."""

    agent: AgentConfig = section(AgentConfig)
    """Agent loops."""

    update_weights_bucket_megabytes: int = option(512, above=0)
    """MiB of weights handed to the engine at a time, on a CPU at most 64. With ``hybrid_engine=false`` there is no such
    limit, and both sides hold twice as much: one bucket travels while another is made or loaded."""

    trace: TraceConfig = section(TraceConfig)
    """Recording of conversations."""

    profiler: FollowingProfilerConfig = section(FollowingProfilerConfig)
    """Profiling of sampling. What an engine does in threads and processes of its own is in no trace."""

    skip_rollout: bool = False
    """Keep every training batch once it is sampled, and take it from there in the next run with equal prompts and
    sampling, for debugging of training. Validation is always sampled."""

    skip_dump_dir: str = option("/tmp/rollout_dump", read_if("skip_rollout"))
    """Folder of such batches, a folder below it per project and experiment."""

    enable_chunked_prefill: bool = True
    """Read long prompts in pieces. No effect with ``hf``."""

    load_format: str = "dummy_dtensor"
    """Source of the engine's first weights: ``dummy`` (``dummy_dtensor``, ``dummy_hf``, ``dummy_megatron``) reads
    none, since the actor's are handed over before sampling; ``auto`` (``hf``, ``dtensor``, ``megatron``) and
    ``safetensors`` read the model's folder."""

    layered_summon: bool = option(False, never_read="weights are always handed over tensor by tensor")
    """Hand weights over layer by layer, to save memory: always done, tensor by tensor."""

    lora_sync: Literal["auto", "merge", "adapter"] = option(
        "auto", read_if("actor_rollout_ref.model.lora_rank", remark="trains all weights")
    )
    """Form in which a LoRA policy reaches the engine. ``merge``: all weights at every sync, the adapter added to them.
    ``adapter``: the base weights once and then only the adapter, which the engine applies itself. ``auto``: ``adapter``
    with vLLM on CUDA where that can be, else ``merge``."""

    use_fire_sampling: bool = False
    """Draw the first token of training responses at a high temperature, so that they start differently. Source: FIRE
    sampling, Chen et al. 2024 (arXiv:2410.21236)."""

    fire_temperature: float = option(30.0, above=0)
    """Temperature of the first token with ``use_fire_sampling``."""

    fire_top_k: int = option(16, at_least=-1)
    """``top_k`` of the first token with ``use_fire_sampling``, where ``top_k`` is off: at a high temperature every
    token of the vocabulary is about as likely. -1 or 0: sample from all."""

    max_running_requests: int | None = option(None, _SERVED, above=0)
    """Requests that run on one replica at a time; the others wait in the driver, and those with the most expected
    tokens leave first. Null: all run at once. Needs ``mode=async``."""

    over_sample_rate: float = option(0.0, at_least=0)
    """Start this share of prompts too many, and train on those whose groups are complete first. The others are put
    off: they come first in the next step. Needs ``mode=async``. See docs/long_tails.md."""

    max_postponements: int | None = option(None, above=0)
    """Once a prompt was deferred in this many steps, the next step waits for all deferred prompts; of engines that
    generate all the time, a step waits for prompts that were started so many steps before. Null:
    ``max_staleness`` with ``partial_rollout``, else 4. Source: tail batching, Gao et al. 2025 (arXiv:2509.21009)."""

    partial_rollout: bool = False
    """Partial rollouts: keep the tokens of responses that are not complete, of deferred prompts or of engines that get
    new weights, and continue them under the newer weights. Source: Kimi Team 2025 (arXiv:2501.12599)."""

    max_staleness: int | None = option(None, at_least=0)
    """Training steps by which the weights behind a token may be older than those it trains. 0: each batch is generated
    with the newest weights. With ``hybrid_engine=false``, 1: the next batch is generated while one is trained on
    (one-step-off-policy); any number with ``partial_rollout``: engines generate all the time (docs/disjoint.md). More
    than 1 sets what it needs and is not given: ``hybrid_engine=false``, ``mode=async``, ``partial_rollout`` and
    ``calculate_log_probs``. With ``over_sample_rate`` and ``partial_rollout`` the bound of kept tokens. Null: 1 with
    ``partial_rollout``, else 0. Its old name: ``async_ratio``. Source: Noukhovitch et al. 2024 (arXiv:2410.18252)."""

    @property
    def staleness(self) -> int:
        """``max_staleness``, or what null stands for."""
        return int(self.partial_rollout) if self.max_staleness is None else self.max_staleness

    limit_images: int | None = option(None, above=0)
    """Images per prompt at most; a prompt with more is refused. Null: as many as the engine takes (vLLM bounds them by
    ``engine_kwargs.vllm.limit_mm_per_prompt``)."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and response at most."""
        return self.prompt_length + self.response_length

    @property
    def log_prob_split(self) -> MicroBatching:
        """Division of the batch into forwards when old log-probs are computed."""
        if self.log_prob_use_dynamic_bsz:
            return MicroBatching(None, self.log_prob_max_token_len_per_gpu)
        return MicroBatching(self.log_prob_micro_batch_size_per_gpu, None)

    @property
    def traits(self) -> "RolloutTraits":
        """Peculiarities of the engine."""
        return ROLLOUTS.get(self.name, RolloutTraits())

    @property
    def pipeline_stages(self) -> int:
        """Groups of layers on GPUs of their own that one copy of the engine has."""
        # null is allowed there, as for options of the engine
        own = self.engine_kwargs.get(self.name) or {}
        return (own.get("pipeline_parallel_size") or 1) if self.traits.has_pipeline else 1


class RolloutTraits(NamedTuple):
    """Peculiarities of a rollout engine that checks of the configuration ask for. A new engine adds a row below."""

    is_external: bool = True
    """A library with options of its own, that shares a model among GPUs."""
    has_pipeline: bool = False
    """Takes ``pipeline_parallel_size``, and reads a prompt in one forward unless chunked."""
    has_cuda_graphs: bool = False
    sampling_kwargs: tuple[str, ...] | None = None
    """Names accepted in ``sampling_kwargs``. None: those of the installed version."""


SINGLE_TURN = "single_turn_agent"
"""The agent loop that does what ``rollout.mode=sync`` does."""

AGENT_LOOPS = (SINGLE_TURN, "tool_agent", "interaction_agent", "env_agent", "openai_agent")
"""Agent loops that come with this package."""


_LOOPS_WITHOUT_REWARD = {SINGLE_TURN, "tool_agent", "interaction_agent"}
"""Agent loops whose rows the reward function scores."""


def loops_may_reward(rollout: RolloutConfig, names: Iterable[str]) -> bool:
    """Return whether rows with these values of ``agent_name`` may bring rewards of their own, and need no scorer."""
    loops = {str(name) for name in names if name} or {rollout.agent.default_agent_loop}
    return rollout.mode == "async" and bool(loops - _LOOPS_WITHOUT_REWARD)


def needs_agent_loops(mode: str, names: Iterable[str]) -> str | None:
    """Why rows with these values of ``agent_name`` cannot be trained on with a ``rollout.mode`` other than async."""
    others = sorted({str(name) for name in names if name} - {SINGLE_TURN})
    if not others:
        return None
    return (
        f"actor_rollout_ref.rollout.mode={mode} with data whose column 'agent_name' asks for {', '.join(others)}: one "
        "call samples one turn, and no agent loop would run. Set actor_rollout_ref.rollout.mode=async (and "
        "agent.agent_loop_config_path for loops of your own), or take the column out of the data to train on single "
        "turns."
    )


# -- Names of engines' sampling parameters, as users write them under ``rollout``: which are handed on, which are not
# Engines judge the values, and the names once more: each refuses at the start what the installed version lacks.

BY_HF = ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "allowed_token_ids")
"""Names that ``hf`` accepts in ``sampling_kwargs``, with the meaning of vLLM's SamplingParams."""

ROLLOUTS = {
    "hf": RolloutTraits(is_external=False, sampling_kwargs=BY_HF),
    "vllm": RolloutTraits(has_pipeline=True, has_cuda_graphs=True),
    "sglang": RolloutTraits(has_cuda_graphs=True),
}
"""Rollout engine -> its peculiarities; an engine of the user's has those of ``RolloutTraits()``."""

HANDED_ON = (
    *BY_HF, "bad_words", "custom_params", "ebnf", "extra_args", "json_schema", "min_new_tokens", "no_stop_trim",
    "regex", "repetition_detection", "skip_reading_prefix_cache", "stop_regex", "structural_tag", "structured_outputs",
    "thinking_token_budget",
)  # fmt: skip
"""Accepted directly under ``rollout`` and ``rollout.val_kwargs``; they become entries of ``sampling_kwargs``."""

_TOKENS = "the trainer reads token ids, and always gets them"
DECIDED: dict[str, str] = {
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "set data.max_response_length"),
    "truncate_prompt_tokens": "set data.truncation",
    **dict.fromkeys(("seed", "sampling_seed"), "set trainer.seed: every response gets its own seed from it"),
    "logprobs": "set rollout.calculate_log_probs=true for those of the sampled tokens",
    "prompt_logprobs": "prompts are not scored by the rollout",
    "best_of": "set rollout.n, and choose among the responses in the reward",
    **dict.fromkeys(("detokenize", "output_kind", "skip_special_tokens", "spaces_between_special_tokens"), _TOKENS),
    "include_stop_str_in_output": "the tokens that complete a stop text are always kept",
    "first_token_temperature": "set rollout.use_fire_sampling and rollout.fire_temperature",
}
"""Parameters that verl sets itself, and the option to use instead."""

OWN = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "do_sample",
    "n",
)  # fmt: skip
"""Parameters with a key of their own."""

_NO_SHAPE = ("no_stop_trim", "repetition_detection", "skip_reading_prefix_cache", "stop_regex")
RESHAPE = tuple(name for name in HANDED_ON if name not in _NO_SHAPE)
"""Parameters after which tokens are sampled from another distribution than softmax(logits / temperature)."""

AT_LEAST = ("min_tokens", "min_new_tokens")
"""Parameters that count a response's tokens down: a continued response asks for what is left."""

OF_WHOLE_RESPONSES = (
    "bad_words", "ebnf", "frequency_penalty", "json_schema", "presence_penalty", "regex", "repetition_detection",
    "stop_regex", "structural_tag", "structured_outputs", "thinking_token_budget",
)  # fmt: skip
"""Parameters that look at the response so far, of which an engine knows only what it sampled itself."""
