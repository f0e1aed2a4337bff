"""verl from Python, for notebooks and other programs: ``verl.Trainer`` and ``verl.make_config``.

    trainer = verl.Trainer({"actor_rollout_ref.model.path": ...}, train_data=rows, reward=function)
    for step in trainer.steps():
        print(step.number, step.metrics["critic/score/mean"])

The run is that of the command line: the options and their checks are the same, ``PPOJob`` prepares it, and
``RayPPOTrainer.steps`` is its loop. Nothing heavy is imported before a trainer starts.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.config.base import READ, ConfigError, ConfigWarning, leaves
from verl.config.command_line import locate, quoted
from verl.config.load import LoadedConfig, load
from verl.config.ppo import PPOConfig
from verl.rewards.functions.given import GivenFunction, given_function

if TYPE_CHECKING:
    import pandas

__all__ = ["Step", "Trainer", "make_config"]

# -- configurations ---------------------------------------------------------------------------------------------------


def make_config(config: Any = None, **options: Any) -> PPOConfig:
    """Return a configuration, checked as that of a command line.

    Args:
        config: a mapping of sections (``{"trainer": {"seed": 1}}``) or of dotted keys (``{"trainer.seed": 1}``); words
            as on the command line (``["trainer.seed=1"]``); the path of a YAML file; or a configuration.
        options: sections (``trainer={"seed": 1}``), or keys with two underscores for a dot (``trainer__seed=1``); they
            hold against ``config``.

    Raises:
        ConfigError: with every problem; an unknown key is named with the nearest that exists.
        TypeError: a value that no option can hold.

    Warns:
        ConfigWarning: old names, and settings without effect.
    """
    source = _source(config, options)
    made = _remembered(_loaded(source))
    vars(made)[_SOURCE] = source
    return made


class _Source(NamedTuple):
    """What a configuration is composed of."""

    words: tuple[str, ...]
    """``key=value``."""
    file: tuple[str, ...] = ()
    """Folder and name of a YAML file."""


_SOURCE = "_made_of"  # entry of a configuration that `make_config` returned


def _loaded(source: _Source) -> LoadedConfig:
    loaded = load(source.words, *source.file)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    return loaded


def _remembered(loaded: LoadedConfig) -> PPOConfig:
    """The typed tree, watched for options that nothing reads; gives the warnings."""
    from verl.config.unused_options import remember_given

    for message in loaded.warnings:
        warnings.warn(message, ConfigWarning, stacklevel=3)
    remember_given(loaded.config, loaded.tree, loaded.given, loaded.warnings)
    return loaded.config


def _source(config: Any, options: Mapping[str, Any]) -> _Source:
    source = _source_of(config)
    more = [word for name, value in options.items() for word in _words(name.replace("__", "."), value)]
    return source._replace(words=(*source.words, *more))


def _source_of(config: Any) -> _Source:
    if config is None:
        return _Source(())
    if isinstance(config, PPOConfig):
        if _SOURCE in vars(config):
            return vars(config)[_SOURCE]
        defaults = dict(leaves(load([]).config))
        changed = {key: value for key, value in leaves(config) if value != defaults.get(key)}
        return _Source(tuple(word for key, value in changed.items() for word in _words(key, value)))
    if hasattr(config, "_metadata"):  # a DictConfig
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=False)
    if isinstance(config, Mapping):
        return _Source(tuple(word for key, value in config.items() for word in _words(str(key), value)))
    if isinstance(config, str | Path):
        path = Path(config).expanduser()
        if path.suffix not in (".yaml", ".yml") or not path.is_file():
            raise ConfigError([f"config={str(config)!r} is no YAML file. Give the path of one, or a dict of options."])
        return _Source((), (str(path.parent.absolute()), path.stem))
    if isinstance(config, Sequence) and all(isinstance(word, str) for word in config):
        return _Source(tuple(config))
    raise TypeError(
        f"config is a {type(config).__name__}: give a dict of options, key=value words, the path of a YAML file, or "
        "what verl.make_config returned."
    )


_NAME = re.compile(r"\w+")
_SPECIAL = re.compile(r"([\\()\[\]{}:=,\s])")  # in an unquoted value of hydra's grammar


def _words(key: str, value: Any) -> Iterator[str]:
    """``key=value`` in hydra's grammar; a word for each entry of a section."""
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        is_section = locate(PPOConfig, key).kind != "free"
        if is_section or all(map(_NAME.fullmatch, value)):
            for name, item in value.items():
                yield from _words(f"{key}.{name}", item)
            return
    yield f"{key}={_literal(key, value)}"


def _literal(key: str, value: Any) -> str:
    if hasattr(value, "item") and not isinstance(value, Mapping) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of numpy or torch
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, Mapping):
        entries = (_SPECIAL.sub(r"\\\1", str(name)) + f": {_literal(key, item)}" for name, item in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_literal(key, item) for item in value)}]"
    raise TypeError(
        f"{key}={value!r}: a {type(value).__name__} is no value of an option. Use numbers, texts, None, lists and "
        "dicts; functions are given as Trainer(reward=...), rows as Trainer(train_data=..., val_data=...)."
    )


# -- data -------------------------------------------------------------------------------------------------------------


def _is_path(data: Any) -> bool:
    is_list = isinstance(data, list | tuple) and len(data) > 0
    return isinstance(data, str | Path) or is_list and all(isinstance(one, str | Path) for one in data)


def _json_lines(data: Any, argument: str, has_reward: bool) -> str:
    """Rows as JSON lines.

    Args:
        data: dicts, a frame of pandas, a table of Arrow or a dataset of ``datasets``.
        has_reward: a row need not name its data source.

    Raises:
        DataError: a row is no dict, or holds what JSON has no form for; names the row.
    """
    from verl.data.table import DataError

    if hasattr(data, "to_pylist"):
        rows = data.to_pylist()
    else:
        rows = data.to_dict("records") if hasattr(data, "iloc") else list(data)
    if not rows:
        raise DataError(f"{argument} has no rows. Give a list of dicts, one a prompt (docs/data_format.md).")
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{argument}[{number}] is a {type(row).__name__}: a row is a dict with at least a prompt, as "
                '{"prompt": "What is 3 + 5?", "ground_truth": "8"}.'
            )
        try:
            lines.append(json.dumps(_whole_row(row, number, has_reward), ensure_ascii=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{argument}[{number}] cannot be written as JSON: {error}. Leave the value out, or write the rows to a "
                f"parquet file and give its path."
            ) from error
    return "\n".join(lines) + "\n"


def _whole_row(row: Mapping[str, Any], number: int, has_reward: bool) -> dict[str, Any]:
    """A row with the columns that scoring needs: ``ground_truth`` stands for the one in ``reward_model``."""
    row = {str(name): value for name, value in row.items()}
    if "ground_truth" in row and "reward_model" not in row and "domain" not in row and "tag" not in row:
        row["reward_model"] = {"style": "rule", "ground_truth": row.pop("ground_truth")}
    if has_reward:
        row.setdefault("data_source", "custom")
        row.setdefault("reward_model", {"style": "rule", "ground_truth": ""})
    row.setdefault("extra_info", {"index": number})
    return row


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no form in it")


# -- the trainer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A finished training step."""

    number: int
    """From 1."""
    metrics: dict[str, float] = field(repr=False)
    """As the loggers get them; of a validation, too, if there was one."""
    batch: Any = field(repr=False)
    """The ``DataProto`` that was trained on."""
    _texts: Callable[[int, Any], list[dict[str, Any]]] = field(repr=False)

    @property
    def samples(self) -> pandas.DataFrame:
        """Prompts, responses and their rewards, a row a response, in the columns of `docs/trajectories.md`."""
        import pandas

        return pandas.DataFrame(self._texts(self.number, self.batch))


_open: list[Trainer] = []
"""The trainer of this process that has started and is not closed: there is one at most."""


class Trainer:
    """One run of PPO, GRPO or a relative, driven from Python.

    ``fit`` trains to the end; ``steps`` is the same as an iterator. Worker processes start with the first of them, with
    ``start`` or with a ``with`` block, and are gone after the last step, an error, Ctrl-C, ``close``, the end of the
    block, and the end of the process.

    Args:
        config, options: as `make_config`.
        train_data, val_data: rows (dicts, a frame of pandas, a table of Arrow, a dataset), or paths of files, in place
            of ``data.train_files`` and ``data.val_files``. Besides the columns of ``docs/data_format.md``, a row may
            have its ``ground_truth`` at the top; with ``reward``, its prompt is enough.
        reward: ``f(data_source, solution_str, ground_truth, extra_info)``, or the path of a Python file
            (``file.py:name``), in place of ``custom_reward_function``. It is called in a process of its own, with what
            it uses pickled; with ``reward_model.sandbox.enable=false`` in this one.
        trainer_cls: a subclass of ``RayPPOTrainer`` with other stages.

    Raises:
        ConfigError, DataError: something cannot be used.
        TypeError: the reward cannot be sent to its process; says why, and what to do.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        train_data: Any = None,
        val_data: Any = None,
        reward: Callable | str | Path | None = None,
        trainer_cls: type | None = None,
        **options: Any,
    ) -> None:
        source = _source(config, options)
        loaded = _loaded(source)
        self._files: dict[Path, str] = {}
        self._function: GivenFunction | None = None
        words = self._take_data(loaded, {"train": train_data, "val": val_data}, callable(reward))
        words += self._take_reward(loaded, reward)
        if words:
            loaded = _loaded(source._replace(words=(*source.words, *words)))
        self.config: PPOConfig = _remembered(loaded)
        self.stopped_early: str | None = None
        """Why the run ended before its last step, a limit of time for example; None: it did not."""
        self._trainer_cls = trainer_cls
        self._trainer: Any = None
        self._stack = ExitStack()
        self._steps: Iterator | None = None
        self._rows: list[dict[str, Any]] = []
        self._last: Step | None = None
        self._is_closed = False

    # -- what is given as objects ------------------------------------------------------------------------------------

    def _take_data(self, loaded: LoadedConfig, given: dict[str, Any], has_reward: bool) -> list[str]:
        words = []
        for name, data in given.items():
            key, argument = f"data.{name}_files", f"{name}_data"
            if data is None:
                if given["train"] is not None and key not in loaded.given:
                    words.append(f"{key}=[]")  # its default is a file of gsm8k
                continue
            self._refuse_twice(loaded, key, argument)
            if _is_path(data):
                words += _words(key, data)
                continue
            path = self._place(loaded, argument) / f"{name}.jsonl"
            self._files[path] = _json_lines(data, argument, has_reward)
            words += _words(key, [str(path)])
        return words

    def _take_reward(self, loaded: LoadedConfig, reward: Any) -> list[str]:
        if reward is None:
            return []
        from verl.utils.import_utils import split_file_name

        key = "custom_reward_function"
        self._refuse_twice(loaded, f"{key}.path", "reward")
        if isinstance(reward, str | Path):
            path, name = split_file_name(str(reward)) or (str(reward), "compute_score")
        else:
            self._function = given_function(reward, "reward", not loaded.config.reward_model.sandbox.enable)
            path, name = str(self._place(loaded, "reward") / "reward.py"), "compute_score"
        return [*_words(f"{key}.path", path), *_words(f"{key}.name", name)]

    def _refuse_twice(self, loaded: LoadedConfig, key: str, argument: str) -> None:
        if key in loaded.given:
            raise ConfigError([f"{key} and {argument} are both given, and mean the same. Leave one of them out."])

    def _place(self, loaded: LoadedConfig, argument: str) -> Path:
        folder = loaded.config.trainer.default_local_dir
        if "://" in folder:
            text = f"trainer.default_local_dir={folder}: {argument} is kept in the run's folder, which must be local"
            raise ConfigError([f"{text}. Name a local folder, or give the path of a file."])
        return Path(folder).expanduser().absolute() / "given"

    # -- the run -----------------------------------------------------------------------------------------------------

    def start(self) -> Trainer:
        """Check everything, start the workers and load the models; does nothing where that was done.

        Raises:
            ConfigError: the run cannot succeed; lists every reason.
            RuntimeError: this trainer is closed, or another one is open.
        """
        if self._trainer is not None:
            return self
        if self._is_closed:
            raise RuntimeError("This trainer is closed. Make another one to train again: it resumes from a checkpoint.")
        if _open:
            raise RuntimeError(
                f"A trainer of {_open[0].config.trainer.default_local_dir} is open in this process, and there can be "
                "one. Call its close() first."
            )
        _open.append(self)
        try:
            self._trainer = self._stack.enter_context(self._session())
        finally:
            if self._trainer is None:
                self._forget()
        return self

    @contextmanager
    def _session(self) -> Iterator[Any]:
        """Own the run's folder, write there what was given, and run a job."""
        from verl.trainer.run_folder import recorded_run

        READ.clear()  # what an earlier trainer of this process read is not read yet
        with recorded_run(self.config, None):
            for path, text in self._files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if self._function is not None:
                self._function.save(Path(self.config.custom_reward_function.path))
            if self.config.trainer.progress_bar and "torch" not in sys.modules:
                print("loading torch and transformers", flush=True)
            from verl.sandbox.pool import close_pools
            from verl.trainer.ppo.job import PPOJob

            job = PPOJob(self.config)
            if self._trainer_cls is not None:
                job.trainer_cls = self._trainer_cls
            self._check_loss()
            try:
                with job.prepared() as trainer:
                    yield trainer
            finally:
                close_pools()

    def _check_loss(self) -> None:
        """Refuse a policy loss that was registered in this process alone, where workers are started by Ray."""
        from verl.algorithms.losses import get_policy_loss_fn
        from verl.utils.import_utils import import_users_modules

        import_users_modules(self.config.actor_rollout_ref.model.external_lib)
        mode = self.config.actor_rollout_ref.actor.policy_loss.loss_mode
        if self.config.trainer.controller == "ray" and get_policy_loss_fn(mode).__module__ == "__main__":
            raise ConfigError(
                [
                    f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} was registered in this notebook or script, "
                    "which the workers of trainer.controller=ray do not see. Put it into a module and name that in "
                    "actor_rollout_ref.model.external_lib, or use trainer.controller=local, whose workers are forked."
                ]
            )

    def steps(self) -> Iterator[Step]:
        """Train, and yield every finished step.

        A loop that is left goes on where it was with the next call. Ctrl-C, or the interrupt of a notebook, raises
        KeyboardInterrupt: when the step is over and saved if ``trainer.save_freq`` saves any, else and the second time
        at once.

        Raises:
            KeyboardInterrupt: as said; the workers are gone.
        """
        self.start()
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        if type(self._trainer).fit is not RayPPOTrainer.fit:
            raise NotImplementedError(
                f"{type(self._trainer).__name__} has a loop of its own in fit: its steps cannot be taken one by one. "
                "Call fit(), or override stages of RayPPOTrainer instead."
            )
        if self._steps is None:
            self._steps = self._trainer.steps()
        while self._trainer is not None:
            with self._closing_on_error():
                found = next(self._steps, None)
            if found is None:
                self.close()
                return
            yield self._noted(*found)

    def fit(self) -> Trainer:
        """Train to the last step, and close; returns this trainer, whose `metrics` stay.

        Raises:
            KeyboardInterrupt: as `steps`.
        """
        self.start()
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        if type(self._trainer).fit is RayPPOTrainer.fit:
            for _ in self.steps():
                pass
            return self
        with self._closing_on_error():
            self._trainer.fit()
        self.close()
        return self

    def validate(self) -> dict[str, float]:
        """Generate responses to the validation prompts, score them, and return the metrics."""
        self.start()
        if not self._trainer.validates:
            raise ValueError("There are no prompts to validate with. Give val_data=, or data.val_files.")
        with self._closing_on_error():
            return self._trainer.validate()

    def save(self) -> Path:
        """Save a checkpoint of the newest step, and return its folder."""
        if self._trainer is None or not self._trainer.global_steps:
            raise RuntimeError("There is nothing to save before the first step, and after close().")
        with self._closing_on_error():
            self._trainer.save_checkpoint()
            self._trainer.finish_saving()
        return self._trainer.last_checkpoint

    def close(self) -> None:
        """End the worker processes and finish what is being written; a second call does nothing.

        Raises:
            KeyboardInterrupt: the run was interrupted, and has saved its step.
        """
        from verl.utils.exit_codes import StoppedEarly

        trainer, self._is_closed = self._trainer, True
        if trainer is None:
            return
        reason = trainer.early_stop.reason
        try:
            with self._stack:
                if self._steps is not None and trainer.global_steps < trainer.total_training_steps and not reason:
                    trainer.stop()  # of a loop that was left
        except StoppedEarly:
            self.stopped_early = reason
            if reason.startswith("SIGINT"):
                raise KeyboardInterrupt from None
        finally:
            self._forget()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            with self._trainer.early_stop.signals():
                yield
        except BaseException as error:
            self._is_closed = True
            try:
                self._stack.__exit__(type(error), error, error.__traceback__)
            finally:
                self._forget()
            raise

    def _forget(self) -> None:
        self._trainer = self._steps = None
        if self in _open:
            _open.remove(self)

    def __enter__(self) -> Trainer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "not started" if self._trainer is None else "open"
        done = f", {self._last.number} steps" if self._last else ""
        return f"<verl.Trainer of {self.config.trainer.default_local_dir}: {state}{done}>"

    # -- numbers and texts -------------------------------------------------------------------------------------------

    def _noted(self, number: int, batch: Any) -> Step:
        from verl.trainer.ppo.run_log import sample_rows_of_batch

        tokenizer, source_key = self._trainer.tokenizer, self.config.data.reward_fn_key
        metrics = dict(self._trainer.metrics)
        self._rows.append({"step": number, **metrics})

        def texts(number: int, batch: Any) -> list[dict[str, Any]]:
            return sample_rows_of_batch(number, batch, tokenizer, source_key)

        self._last = Step(number, metrics, batch, texts)
        return self._last

    @property
    def metrics(self) -> pandas.DataFrame:
        """Metrics of the steps that this trainer made, a row a step."""
        import pandas

        return pandas.DataFrame(self._rows).set_index("step") if self._rows else pandas.DataFrame()

    @property
    def samples(self) -> pandas.DataFrame:
        """Samples of the newest step; ``trainer.rollout_data_dir`` keeps those of all in files."""
        import pandas

        return self._last.samples if self._last else pandas.DataFrame()
