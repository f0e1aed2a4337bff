"""Prompts: files, columns, lengths, batches."""

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.base import Config, option, read_if, section


@dataclass
class ClassFileConfig(Config):
    """A class of the user's, named by file."""

    path: str | None = None
    """Python file (or ``pkg://module``) that defines it. Null: verl's own."""

    name: str | None = None
    """Name of the class in that file."""


@dataclass
class SamplerConfig(Config):
    """A sampler of the user's: subclass of ``verl.experimental.dataset.sampler.AbstractSampler``."""

    class_path: str | None = None
    """Python file that defines it. Null: random order if ``data.shuffle``, else the order of the file."""

    class_name: str | None = None
    """Name of the class in that file."""


@dataclass
class DataConfig(Config):
    """The data set of prompts and how it is read."""

    tokenizer: str | None = None
    """Tokenizer to use, as a path or hub id. Null: the one in ``actor_rollout_ref.model.path``."""

    use_shm: bool = False
    """Copy files to /dev/shm before reading."""

    train_files: str | list[str] = "~/data/rlhf/gsm8k/train.parquet"
    """Training prompts: one or a list of files (.parquet, .arrow, .json, .jsonl, .csv), globs, folders of files, remote
    paths (``hdfs://``, ``s3://``, ``gs://``, ...) and Hugging Face data sets (a folder of ``save_to_disk``, or
    ``owner/name:config:split``)."""

    val_files: str | list[str] | None = "~/data/rlhf/gsm8k/test.parquet"
    """Validation prompts, named in the same ways. Null, ``''`` or ``[]``: nothing is validated."""

    train_max_samples: int = option(-1, at_least=-1)
    """Use at most that many rows of ``train_files``: sampled with ``seed`` if ``shuffle``, else the first. -1: all."""

    val_max_samples: int = option(-1, at_least=-1)
    """The same for ``val_files``."""

    prompt_key: str = "prompt"
    """Column of prompts: a list of {role, content} messages, or a text, which is one user message."""

    messages_key: str | None = None
    """Column of messages, taken instead of ``prompt_key``: a list of {role, content}, or the JSON text of one."""

    prompt_id_key: str | None = None
    """Column of ids, one a prompt and no two alike; it is handed on as ``prompt_id``. Null: prompts have none."""

    max_prompt_id_length: int | None = option(None, read_if("prompt_id_key"), above=0)
    """Tokens a prompt id may have; its token ids are handed on as ``prompt_id_ids``. Null: ids are not tokenized."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of rows no run can use (lines that are no record, prompts that are null or empty, unknown roles,
    ...): stop before anything starts, or leave them out. Either way they are named with file, row and reason."""

    mixture: dict[str, Any] = option({})
    """Free-form: source (value of the ``reward_fn_key`` column, or a pattern such as ``math/*``, the first that fits)
    -> its share of the training prompts. Shares add up to 1 and are kept in every stretch of prompts to within one.
    Empty: every row once an epoch."""

    domains: dict[str, Any] = option({})
    """Free-form: domain -> the values of the ``reward_fn_key`` column that belong to it, or patterns such as ``aime*``;
    a row's own column ``domain`` goes before. The value becomes ``domain/value``, rows of no domain are left out, and
    top-level ``ground_truth``, ``test_cases`` and ``difficulty`` are read as ROLL's data have them
    (docs/data_format.md). Empty: columns are taken as they are."""

    reward_fn_key: str = "data_source"
    """Column that chooses the scorer and groups validation metrics."""

    max_prompt_length: int = option(512, above=0)
    """Tokens; prompts are left-padded to this."""

    max_response_length: int = option(512, above=0)
    """Tokens; a response is cut here."""

    train_batch_size: int = option(1024, above=0)
    """Prompts of one training step, before each is sampled ``rollout.n`` times."""

    val_batch_size: int | None = option(None, above=0)
    """Prompts validated at a time. Null: all at once."""

    return_raw_input_ids: bool = False
    """Also return token ids of what the messages say, without chat template, as column ``raw_input_ids``."""

    return_raw_chat: bool = False
    """Also return the messages themselves, as column ``raw_prompt``."""

    return_full_prompt: bool = False
    """Also return the prompt text with its chat template, as column ``full_prompts``."""

    shuffle: bool = True
    """Draw training prompts in random order, a new one each epoch."""

    dataloader_num_workers: int = option(8, at_least=0)
    """Processes reading rows ahead. 0: the driver reads them itself."""

    validation_shuffle: bool = False
    """Draw validation prompts in random order."""

    filter_overlong_prompts: bool = False
    """Drop prompts longer than ``max_prompt_length`` when loading. Token ids of 5000 prompts and more are kept in
    ``cache_dir``."""

    filter_overlong_prompts_workers: int = option(1, read_if("filter_overlong_prompts"), at_least=1)
    """Processes that render and measure the prompts for that, and to find those the chat template refuses."""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of a prompt over ``max_prompt_length``: stop, keep its end (``left``: cut at the left), keep its
    start (``right``), or keep both ends (``middle``)."""

    image_key: str = "images"
    """Column of images, each {bytes} or {path}; a message shows them where it says ``<image>``, in order. Needs a
    vision-language model."""

    video_key: str = "videos"
    """Column of videos, each a list of frames as of ``image_key``, {frames, fps}, or a video file as {bytes} or {path};
    a message shows them where it says ``<video>``, in order. Needs a Qwen2-VL or Qwen2.5-VL model and
    ``rollout.name=hf``, ``rollout.mode=sync``."""

    trust_remote_code: bool = False
    """Let the tokenizer run Python code that comes with the model folder."""

    custom_cls: ClassFileConfig = section(ClassFileConfig)
    """Data set class of the user's, built as ``cls(data_files=, tokenizer=, processor=, config=)``."""

    return_multi_modal_inputs: bool = True
    """Make the model's image tensors where prompts are read. False: the workers make them, of the images: less to send,
    and made again for every forward and update."""

    sampler: SamplerConfig = section(SamplerConfig)
    """Sampler of the user's, a curriculum for example."""

    datagen: ClassFileConfig = section(ClassFileConfig)
    """Generator of new prompts during training: subclass of
    ``verl.data.dynamicgen_dataset.AbstractDataGenerator``."""

    seed: int | None = None
    """Seed of the shuffling. Null: ``trainer.seed``."""

    gen_batch_size: int | None = option(None, above=0)
    """Prompts used per step if not ``train_batch_size``; with ``algorithm.filter_groups``, at a time. Null: the
    same."""

    cache_dir: str = "~/.cache/verl/rlhf"
    """Folder for copies of remote files, of large files as Arrow, and of token ids. It may be deleted at any time."""

    apply_chat_template_kwargs: dict[str, Any] = option({})
    """Free-form: arguments of the tokenizer's chat template, enable_thinking for example."""

    tool_config_path: str | None = None
    """Tools that prompts are measured with; follows ``multi_turn.tool_config_path``, whose schemas the chat template
    shows."""

    function_tool_path: str | None = None
    """The same for ``multi_turn.function_tool_path``."""

    need_tools_kwargs: bool = False
    """Warn of rows without ``extra_info.tools_kwargs``. A row's own ``extra_info.need_tools_kwargs`` goes before."""

    @property
    def prompts_per_step(self) -> int:
        """Prompts one training step takes from the loader; with ``algorithm.filter_groups``, at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def files(self) -> dict[str, list[str]]:
        """Key of the option -> its files, always as a list."""
        return {f"data.{key}": _as_list(self[key]) for key in ("train_files", "val_files")}

    @property
    def has_validation(self) -> bool:
        """Are there validation prompts?"""
        return bool(self.files["data.val_files"])


def _as_list(value: Any) -> list:
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if one]
