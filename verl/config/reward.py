"""Sources of scores: a function, a manager around it, or a reward model."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from verl.batch import MicroBatching
from verl.config.base import Config, Problem, ReadIf, option, read_if, section
from verl.config.engine import DeepSpeedConfig, FSDPConfig, Strategy
from verl.config.engine_options import READ, engine_options
from verl.config.megatron import MegatronConfig
from verl.config.profiler import ProfilerConfig
from verl.config.rollout import RolloutConfig


@dataclass
class RewardFunctionConfig(Config):
    """A scoring function of the user's."""

    _read_if: ClassVar[ReadIf] = read_if("path")

    path: str | None = None
    """Python file that defines it. Null: the built-in scorers, chosen by ``data.reward_fn_key``."""

    name: str = "compute_score"
    """Name of the function: ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""

    reward_kwargs: dict[str, Any] = option({})
    """Free-form: keyword arguments added to every call."""


@dataclass
class RewardSandboxConfig(Config):
    """Reward functions in killable processes of their own; what exceeds a limit is a failed sample."""

    _read_if: ClassVar[ReadIf] = read_if("enable", remark="calls the function in the driver")

    enable: bool = True
    """False: call the function in the driver, without limits; for functions one trusts that need the driver's memory
    or take less than a tenth of a millisecond."""

    workers: int | None = option(None, above=0)
    """Processes of one function; each has a copy of its module. Null: one, and while calls wait and all are busy one
    more, up to one a core and 8; with an ``async def`` function, or ``reward_manager=batch``, one. With 1 a function
    sees all samples, and may keep state between calls."""

    while_generating: bool = True
    """Begin to score each response as soon as it has ended, while others are generated; the scores are the same. For
    managers that call the function once a response (``naive``, ``prime``, ``dapo``)."""

    timeout_s: float = option(60.0, above=0)
    """Seconds of one call about one sample."""

    batch_timeout_s: float = option(600.0, above=0)
    """Seconds of one call about a whole batch (``reward_manager=batch``)."""

    start_timeout_s: float = option(300.0, above=0)
    """Seconds in which a process must have loaded the function's file."""

    cpu_s: float | None = option(None, above=0)
    """CPU seconds of one call, all threads together. Null: no limit but the time."""

    memory_mb: int | None = option(8192, above=0)
    """MiB one process may hold, and it together with all it started. Null: no limit."""

    output_mb: int | None = option(4, above=0)
    """MiB one call may print. Null: no limit."""

    processes: int | None = option(64, above=0)
    """Processes at a time: the function's own and those it starts. Null: no limit."""

    network: bool = True
    """False: the function reaches nothing over the network, where the kernel allows to cut it."""

    visible_keys: list[str] = option([])
    """Environment variables that the function sees although their names are those of keys, tokens and passwords:
    names, or patterns such as ``OPENAI_*``. All others of that kind are kept from it."""

    allow_uncontained_code: bool = False
    """Let the built-in scorers run generated programs where this system cannot contain them, too. False: such a
    program ends the run before its first line runs. Tools and environments go by the environment variable
    ``VERL_ALLOW_UNCONTAINED_CODE=1``."""


@dataclass
class SandboxFusionConfig(Config):
    """Service in which the built-in scorers run programs that the model wrote."""

    url: str | None = None
    """Address of a sandbox-fusion service, ``http://host:port/run_code``. Null: child processes of this machine."""

    max_concurrent: int = option(64, above=0)
    """Requests to the service at a time, of all processes of one machine."""

    memory_limit_mb: int = option(1024, above=0)
    """Memory of one program, MiB, there or here."""


@dataclass
class JudgeConfig(Config):
    """A language model that scores responses, behind an OpenAI-compatible address."""

    url: str | None = None
    """The address up to ``/v1``. Null: no judge, and nothing is sent anywhere."""

    model: str = ""
    """The name under which the server knows the model."""

    data_sources: list[str] = option([])
    """Data sources it scores, or patterns such as ``essays/*``. Empty: those without a built-in scorer."""

    prompt: str | None = None
    """The message to the judge, or the path of a file that holds it, with ``{question}``, ``{response}``,
    ``{ground_truth}`` and ``{data_source}``. Null: a comparison with the reference, on a scale from 0 to 10."""

    score_pattern: str = r"score[^\w+-]*([-+]?\d+(?:\.\d+)?)"
    """Regular expression; its last match in the judge's answer is the score."""

    lowest: float = 0.0
    """The lowest score of the judge's scale; becomes 0."""

    highest: float = 10.0
    """The highest score of the judge's scale; becomes 1."""

    temperature: float = option(0.0, at_least=0)
    """Sampling temperature of the judge."""

    max_tokens: int = option(512, above=0)
    """Tokens the judge may write."""

    api_key_env: str = "VERL_JUDGE_API_KEY"
    """Environment variable that holds the key of the server, if it wants one. The key itself stands in no file."""

    max_concurrent: int = option(16, above=0)
    """Requests under way at a time, of all processes of one machine."""

    requests_per_minute: float | None = option(None, above=0)
    """Requests begun in a minute, likewise. Null: no limit."""

    timeout_s: float = option(60.0, above=0)
    """Seconds the server may take for an answer."""

    tries: int = option(4, above=0)
    """Requests for one answer: one more after each that was refused for now, was too slow, or found nobody."""

    cache_dir: str | None = None
    """Folder that keeps answers, by everything that went into the request. Null: every response is judged again."""


@dataclass
class RewardRouterConfig(Config):
    """Between reward functions and the servers of a reward model or judge."""

    server: Literal["vllm", "sglang"] = "vllm"
    """Protocol of the servers of a classifier (``reward_model.enable=true``)."""

    model: str | None = None
    """Name of the model at the servers, for requests that name none. Null: the first one that they list."""

    api_key_env: str = "VERL_REWARD_API_KEY"
    """Environment variable that holds the key of the servers, if they want one. The key itself stands in no file."""

    max_concurrent: int = option(64, above=0)
    """Requests under way at a time."""

    requests_per_minute: float | None = option(None, above=0)
    """Requests begun in a minute. Null: no limit."""

    tokens_per_minute: float | None = option(None, above=0)
    """Tokens of prompts and answers in a minute, at an even pace. A request counts as its token ids, or a quarter of
    its text's bytes, and the tokens it asks for; once it is answered, as what the server says that it took. Null: no
    limit."""

    timeout_s: float = option(300.0, above=0)
    """Seconds a server may take for an answer."""

    tries: int = option(5, above=0)
    """Requests for one answer: one more, at another server, after each that failed for now or was too slow."""


@dataclass
class RewardModelModelConfig(Config):
    """Model that scores whole responses."""

    input_tokenizer: str | None = "~/models/deepseek-llm-7b-chat"
    """Tokenizer of the policy if its tokens or chat template differ from the reward model's: each conversation is then
    rewritten in the reward model's, which needs ``data.return_raw_chat``. Follows ``actor_rollout_ref.model.path``.
    Null: the reward model reads the policy's token ids as they are."""

    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    """Folder or hub id of a causal model that was trained to score texts: a sequence or token classifier with one
    label, its head among the weights. The score is read off the last token."""

    external_lib: str | None = None
    """Module to import before the model is built; follows the actor's."""

    trust_remote_code: bool = False
    """Let the model run Python code that comes with its folder."""

    use_shm: bool = False
    """Copy the model to /dev/shm before loading."""

    use_remove_padding: bool = False
    """Pack rows into one sequence."""

    use_fused_kernels: bool = option(False, never_read="a score needs no logits over tokens")
    """Follows ``actor_rollout_ref.model.use_fused_kernels``. No effect: there are no logits over a vocabulary."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding, offload and number formats."""


@dataclass
class RewardModelConfig(Config):
    """The reward model, and the manager that calls scoring functions."""

    enable: bool = False
    """Score responses with a model: ``rm_scores``, which the built-in managers give out as rewards. Validation rows
    whose ``reward_model`` has another ``style`` than ``model`` are scored by function all the same. False: with
    functions only."""

    enable_resource_pool: bool = False
    """Devices of its own for the reward model, or for the engine of ``rollout``: ``nnodes`` x ``n_gpus_per_node``.
    False: it takes turns with the policy on the devices of training, where an engine sleeps while it does not score."""

    nnodes: int = option(0, read_if("enable_resource_pool"), at_least=0)
    """Nodes that only it uses."""

    n_gpus_per_node: int = option(0, read_if("enable_resource_pool"), at_least=0)
    """Devices of each such node."""

    rollout: dict[str, Any] = option({})
    """Run ``model.path`` in a rollout engine behind a server; keys of ``actor_rollout_ref.rollout`` such as name,
    tensor_model_parallel_size, dtype, max_model_len, gpu_memory_utilization, engine_kwargs. With ``enable=true`` a
    sequence classifier (vllm, sglang): with ``enable_resource_pool`` it scores each response as soon as it has ended,
    without it the batch when it is whole. With ``enable=false`` and ``enable_resource_pool`` a language model that
    judges (hf, vllm, sglang): a reward function asks it by its argument ``reward_router_address``. Empty: none."""

    server_host: str = "127.0.0.1"
    """Address on which the engine of ``rollout`` listens; the driver must reach it."""

    server_urls: str | list[str] = option([])
    """Base URLs of servers that run already, ``http://HOST:PORT``. With ``enable=false`` a judge: a reward function
    asks it by its argument ``reward_router_address``. With ``enable=true`` a classifier with one output, of vLLM
    (``--runner pooling``) or SGLang, whose tokenizer is that of ``model.path``. Empty: it runs here."""

    router: RewardRouterConfig = section(RewardRouterConfig)
    """Limits and retries of requests to these servers."""

    use_reward_loop: bool = True
    """Score responses one by one as they end. False: when the batch is whole, as ``sandbox.while_generating=false``."""

    strategy: Strategy = "fsdp"
    """Engine of the reward model, as ``actor.strategy``."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``."""

    megatron: MegatronConfig = section(MegatronConfig)
    """Parallelism, formats and offload, with ``strategy=megatron``; the mesh follows the actor's."""

    model: RewardModelModelConfig = section(RewardModelModelConfig)
    """The reward model."""

    micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward, summed over all ranks. Becomes the option below and is null afterwards."""

    micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward on one device."""

    max_length: int | None = option(None, above=0)
    """Tokens at which a conversation that was rewritten (``model.input_tokenizer``) is cut; what comes first is
    kept, and the score is that of the text up to there. Null: as many as the reward model has positions for."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens; follows the critic's."""

    forward_max_token_len_per_gpu: int = option(32768, above=0)
    """Tokens of one micro-batch on one device; follows the critic's."""

    reward_manager: str = "naive"
    """Manager of the scoring function: ``naive`` (row by row), ``prime`` (rows side by side), ``batch`` (once, with
    lists), ``dapo`` (as naive, with a penalty for responses near the limit), a name given to
    ``verl.workers.reward_manager.register``, or ``file.py:Class``."""

    by_source: dict[str, Any] = option({})
    """Free-form: data source, or a pattern such as ``math/*``, to the function that scores its rows: ``file.py:name``,
    ``file.py``, ``builtin``, ``builtin:NAME`` (the rule of another data source: ``math``, ``code``, ``ifeval``, ...),
    or ``{function: builtin:NAME, ...}`` with keyword arguments of that rule. The first that fits is taken; rows that
    fit none go to ``custom_reward_function`` or, if that is null, to the built-in scorers."""

    sandbox: RewardSandboxConfig = section(RewardSandboxConfig)
    """Limits of the scoring function."""

    self_test: Literal["warn", "stop", "off"] = "warn"
    """Before the first step, score a few known-good and known-bad answers: what then looks wrong is reported, or stops
    the run."""

    launch_reward_fn_async: bool = False
    """Call the scoring function in a thread of the driver while log-probs and values are computed."""

    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    """Service in which the built-in scorers run programs that the model wrote."""

    judge: JudgeConfig = section(JudgeConfig)
    """A language model that scores responses."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the reward model."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence."""

    reward_kwargs: dict[str, Any] = option({})
    """Free-form: keyword arguments of the reward manager."""

    on_error: Literal["stop", "zero_and_count", "drop_sample"] = "stop"
    """When a scoring function raises, is ended, or returns no finite number. ``stop``: end the run, naming the sample.
    ``zero_and_count``: score 0. ``drop_sample``: the sample leaves the loss and the statistics of its group. Failures
    are counted in ``reward/errors/<kind>``."""

    max_errors: int | None = option(None, at_least=0)
    """Failed samples of the run that are borne; one more stops it. Null: none with ``on_error=stop``, any number
    otherwise. With ``on_error=stop`` those that are borne are dropped."""

    @property
    def urls(self) -> list[str]:
        """``server_urls``, always as a list."""
        return [self.server_urls] if isinstance(self.server_urls, str) else list(self.server_urls)

    @property
    def runs_judge(self) -> bool:
        """Does this run have a judge of its own, in a rollout engine?"""
        return self.runs_server and not self.enable

    @property
    def runs_server(self) -> bool:
        """Does this run have a judge or a classifier of its own, in a rollout engine?"""
        has_devices = self.enable_resource_pool or self.enable
        return has_devices and not self.server_urls and bool(self.rollout.get("name"))

    @property
    def shares_devices(self) -> bool:
        """Does a classifier in a rollout engine take turns with the policy on the devices of training?"""
        return self.runs_server and not self.enable_resource_pool

    @property
    def asks_servers(self) -> bool:
        """Do requests go to servers, through the router?"""
        return bool(self.server_urls) or self.runs_server

    @property
    def uses_engine(self) -> bool:
        """Does a classifier score in the training engine?"""
        return self.enable and not self.asks_servers

    @property
    def has_workers(self) -> bool:
        """Do processes of this run have a reward model, or a server of one or of a judge?"""
        return self.uses_engine or self.runs_server

    @property
    def own_processes(self) -> list[int]:
        """Processes that only it uses, by node; none where it takes turns with the policy, or is elsewhere."""
        has_own = self.enable_resource_pool and self.has_workers
        return [self.n_gpus_per_node] * self.nnodes if has_own else []

    def engine_options(self, problems: list[Problem] | None = None, notes: list[str] | None = None) -> RolloutConfig:
        """Options of the rollout engine of ``rollout``; what is wrong goes to ``problems``, what has no effect to
        ``notes``."""
        base = RolloutConfig(
            load_format="auto",
            free_cache_engine=self.shares_devices,
            tensor_model_parallel_size=1,
            prompt_length=2048,
            response_length=2048,
        )
        # a classifier samples nothing; requests to a judge carry their own sampling parameters
        reads = READ if self.enable else (*READ, "limit_images", "use_fire_sampling")
        options = engine_options(base, self.rollout, "reward_model.rollout", problems, notes, reads)
        if options.free_cache_engine and not self.shares_devices:  # nothing would wake it
            options = replace(options, free_cache_engine=False)
        return options

    @property
    def sharding(self) -> FSDPConfig | MegatronConfig:
        """Sharding, offload and number formats of the engine that ``strategy`` names."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

    @property
    def forward_split(self) -> MicroBatching:
        """Division of a batch into forwards."""
        if self.use_dynamic_bsz:
            return MicroBatching(None, self.forward_max_token_len_per_gpu)
        return MicroBatching(self.micro_batch_size_per_gpu, None)
