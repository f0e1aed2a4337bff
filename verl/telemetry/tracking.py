"""Metric trackers: console, TensorBoard, Weights & Biases, a JSONL file, or a backend of your own.

Names are ``trainer.logger``. Knows numbers and steps, not what they mean. A backend's package is imported when the
backend is chosen and not before.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import netrc
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlparse

from verl.compat import NotBuilt
from verl.telemetry.run_record import mask
from verl.utils.process import get_logger, warn_once

logger = get_logger(__name__)


class Backend:
    """One backend of metrics. A subclass defines ``log``; the rest is optional."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Open it. ``kwargs`` are ``trainer.tracker_kwargs.<name>``."""

    @classmethod
    def check(cls) -> None:
        """Raise ImportError if a package it needs is missing; called before anything slow is started."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define log(data, step)")

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Show validation samples, each (input, output, score)."""
        warn_once(f"trainer.log_val_generations has no effect on {type(self).__name__}")

    def finish(self) -> None:
        """Close it; called once."""


BackendFactory = Callable[..., Backend]
_BACKENDS: dict[str, BackendFactory] = {}


def register_backend(name: str) -> Callable[[BackendFactory], BackendFactory]:
    """Make a ``Backend`` class known as ``name`` in ``trainer.logger``."""

    def add(factory: BackendFactory) -> BackendFactory:
        _BACKENDS[name] = factory
        return factory

    return add


def check_backends(names: str | Sequence[str]) -> None:
    """See that every logger named is known and its package installed.

    Raises:
        ValueError, ImportError: as ``Tracking`` would.
    """
    for name in [names] if isinstance(names, str) else names:
        getattr(_get_backend(name), "check", lambda: None)()


def known_backends() -> list[str]:
    return sorted(_BACKENDS)


def _get_backend(name: str) -> BackendFactory:
    if name == "tracking":
        warn_once("trainer.logger: 'tracking' is the old name of 'wandb' and will go away; write wandb")
        name = "wandb"
    if name not in _BACKENDS:
        close = difflib.get_close_matches(name, _BACKENDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"trainer.logger={name!r} is not a known logger. Known: {', '.join(known_backends())}.{hint} "
            "A logger of your own is made known with verl.telemetry.tracking.register_backend."
        )
    return _BACKENDS[name]


def _import_for(option: str, module: str, package: str) -> Any:
    """Import what ``option`` needs; if it is missing, raise with the option and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"trainer.logger={option} needs the package {package}, which cannot be imported ({error}). "
            f"Install it with `pip install {package}`, or take {option} out of trainer.logger."
        ) from error


class Tracking:
    """Sends every step's metrics to all chosen loggers.

    Args:
        project_name, experiment_name: name the run in every backend.
        default_backend: one name or several; see ``known_backends()``.
        config: the run's options; stored by backends that show them. ``trainer.tracker_kwargs.<name>`` in it goes to
            backend ``<name>``.

    Raises:
        ValueError: unknown name.
        ImportError: a chosen backend's package is missing.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        config = config or {}
        options = dict(_section(config, "trainer", "tracker_kwargs"))
        factories = {name: _get_backend(name) for name in dict.fromkeys(names)}
        unused = sorted(set(options) - set(factories))
        if unused:
            warn_once(f"trainer.tracker_kwargs.{unused[0]} has no effect: {unused[0]} is not in trainer.logger={names}")
        self.logger: dict[str, Backend] = {}
        for name, factory in factories.items():
            self.logger[name] = factory(project_name, experiment_name, config, **dict(options.get(name) or {}))

    def log(self, data: Mapping[str, Any], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Send ``data`` to all backends, or to those named."""
        chosen = None if backend is None else {backend} if isinstance(backend, str) else set(backend)
        for name, instance in self.logger.items():
            if chosen is None or name in chosen:
                instance.log(data, step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Show validation samples, each (input, output, score), in all backends."""
        for instance in self.logger.values():
            instance.log_generations(samples, step)

    def finish(self) -> None:
        """Close all backends; calling it again does nothing."""
        backends, self.logger = self.logger, {}
        for instance in backends.values():
            instance.finish()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()


class ValidationGenerationsLogger:
    """Shows validation samples in the loggers of a ``Tracking``.

    Args:
        tracking: the open loggers. Without it only W&B's running run and the console can be reached, which is how
            user code made this object before.
    """

    def __init__(
        self, project_name: str | None = None, experiment_name: str | None = None, tracking: Tracking | None = None
    ) -> None:
        self.tracking = tracking
        self.project_name, self.experiment_name = project_name or "verl", experiment_name or "run"

    def log(self, loggers: str | Sequence[str], samples: Sequence[Sequence[Any]], step: int) -> None:
        """Show ``samples``, each (input, output, score), in the backends named by ``loggers``."""
        for name in [loggers] if isinstance(loggers, str) else loggers:
            if self.tracking is not None:
                if name in self.tracking.logger:
                    self.tracking.logger[name].log_generations(samples, step)
            elif name in ("wandb", "tracking"):
                _log_wandb_table(_import_for("wandb", "wandb", "wandb"), self, samples, step)
            elif name == "console":
                _print_generations(samples, step)

    def log_generations_to_wandb(self, samples: Sequence[Sequence[Any]], step: int, wandb: Any = None) -> None:
        """Add the samples to a table of W&B's running run."""
        _log_wandb_table(wandb or _import_for("wandb", "wandb", "wandb"), self, samples, step)

    def log_generations_to_tensorboard(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Show the samples in the event files of ``TENSORBOARD_DIR``, or of this object's project and experiment."""
        if not hasattr(self, "tensorboard"):
            self.tensorboard = TensorboardBackend(self.project_name, self.experiment_name, {})
        self.tensorboard.log_generations(samples, step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("log_generations_to_"):
            raise NotBuilt(
                f"ValidationGenerationsLogger.{name} asks for a logger: that is not built. Use one of "
                f"{', '.join(known_backends())}, or add yours with verl.telemetry.tracking.register_backend."
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


# -- backends ---------------------------------------------------------------------------------------------------------


def format_console_line(data: Mapping[str, Any], step: int) -> str:
    """``step:3 - actor/lr:2e-05 - ...``; what is not a number is left out."""
    parts = [f"step:{step}"]
    for name, value in data.items():
        number = _as_number(value)
        if number is not None:
            parts.append(f"{name}:{number!r}")
    return " - ".join(parts)


HEADLINE = (
    "critic/score/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "actor/kl_loss",
    "perf/time_per_step",
)  # fmt: skip
"""Metrics that stand on the first line of a step, with those of a validation."""


def format_console_block(data: Mapping[str, Any], step: int, width: int = 120) -> str:
    """The same numbers to four digits for a person: ``step:3 - `` and what matters most, then a group a line.

    Keys stand in full. Lines after the first are indented, so that each step has one line with ``step:``; few numbers
    need no other.
    """
    texts = {name: f"{name}:{_rounded(number)}" for name in data if (number := _as_number(data[name])) is not None}
    whole = " - ".join([f"step:{step}", *texts.values()])
    if len(whole) <= width:
        return whole
    lines = [f"step:{step}"]
    for name in [*(name for name in texts if name.startswith("val-core/")), *HEADLINE]:
        if name in texts and len(lines[0]) + len(texts[name]) + 3 <= width:
            lines[0] += f" - {texts.pop(name)}"
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(name.partition("/")[0], []).append(text)
    for group in groups.values():
        lines.append(f"  {group[0]}")
        for text in group[1:]:
            if len(lines[-1]) + len(text) + 3 <= width:
                lines[-1] += f" - {text}"
            else:
                lines.append(f"  {text}")
    return "\n".join(lines)


def _rounded(number: int | float) -> str:
    return repr(float(f"{number:.4g}")) if isinstance(number, float) else repr(number)


@register_backend("console")
class ConsoleBackend(Backend):
    """The numbers of a step on standard output.

    Args:
        format: ``block``: rounded, a line a group. ``line``: all on one line with all digits, as verl prints them.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], format: str = "block"
    ) -> None:
        forms = {"block": format_console_block, "line": format_console_line}
        if format not in forms:
            raise ValueError(f"trainer.tracker_kwargs.console.format={format!r} must be one of block, line.")
        self.form = forms[format]

    def log(self, data: Mapping[str, Any], step: int) -> None:
        print(self.form(data, step), flush=True)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        _print_generations(samples, step)


@register_backend("file")
class FileBackend(Backend):
    """JSON lines: ``{"step": N, "data": {...}}``, appended, so that a resumed run goes on in the same file.

    Not-a-number and infinities become the strings "NaN", "Infinity" and "-Infinity", since JSON has no such numbers.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        path: str | None = None,
    ) -> None:
        self.path = Path(path).expanduser() if path else metrics_file(project_name, experiment_name, config)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = open(self.path, "a", encoding="utf-8")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        record = {"step": step, "data": {name: _json_value(value) for name, value in data.items()}}
        self.file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self.file.flush()

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        rows = [[_json_value(cell) for cell in sample] for sample in samples]
        self.file.write(json.dumps({"step": step, "generations": rows}, ensure_ascii=False, allow_nan=False) + "\n")
        self.file.flush()

    def finish(self) -> None:
        self.file.close()


@register_backend("tensorboard")
class TensorboardBackend(Backend):
    """Event files in ``TENSORBOARD_DIR``, default ``tensorboard_log/{project}/{experiment}``."""

    @classmethod
    def check(cls) -> None:
        _import_for("tensorboard", "tensorboard", "tensorboard")

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], log_dir: str | None = None
    ) -> None:
        self.check()
        module = _import_for("tensorboard", "torch.utils.tensorboard", "tensorboard")
        self.folder = log_dir or tensorboard_folder(project_name, experiment_name)
        os.makedirs(self.folder, exist_ok=True)
        self.writer = module.SummaryWriter(self.folder)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in data.items():
            number = _as_number(value)
            if number is not None:
                self.writer.add_scalar(name, number, step)
        self.writer.flush()  # a killed run keeps what it logged

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        for i, (prompt, response, score) in enumerate(samples):
            text = f"**input**\n\n{prompt}\n\n**output**\n\n{response}\n\n**score** {score}"
            self.writer.add_text(f"val/generations/{i}", text, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


@register_backend("wandb")
class WandbBackend(Backend):
    """Weights & Biases. Offline when ``WANDB_MODE`` says so, when no API key is set up, or when it cannot be reached.

    Offline runs lie under ``wandb/`` and are sent later with ``wandb sync``.
    """

    @classmethod
    def check(cls) -> None:
        _import_for("wandb", "wandb", "wandb")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        self.wandb = _import_for("wandb", "wandb", "wandb")
        options: dict[str, Any] = {"project": project_name, "name": experiment_name, "config": _plain_dict(config)}
        proxy = _section(config, "trainer").get("wandb_proxy")
        if proxy:
            options["settings"] = self.wandb.Settings(https_proxy=proxy)
        if "WANDB_ENTITY" in os.environ:
            options["entity"] = os.environ["WANDB_ENTITY"]
        options.update(kwargs)
        if "mode" not in options and not os.environ.get("WANDB_MODE") and not wandb_has_key():
            warn_once(
                "wandb: no API key is configured, so this run is logged offline under ./wandb (send it later with "
                "`wandb sync`). Run `wandb login` or set WANDB_API_KEY to log online; WANDB_MODE=offline says it is "
                "meant, and trainer.logger=[console] leaves wandb out."
            )
            options["mode"] = "offline"
        self.run = self._start(options)
        self.table_rows: list[list[Any]] = []

    def _start(self, options: dict[str, Any]) -> Any:
        try:
            return self.wandb.init(**options)
        except self.wandb.errors.CommError as error:
            warn_once(f"wandb cannot be reached ({error}); this run is logged offline under ./wandb")
            return self.wandb.init(**{**options, "mode": "offline"})

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(data), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        _log_wandb_table(self.wandb, self, samples, step)

    def finish(self) -> None:
        self.run.finish(exit_code=0)


# -- addresses --------------------------------------------------------------------------------------------------------


def metrics_file(project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None) -> Path:
    """Return the path that the ``file`` logger writes to.

    ``VERL_FILE_LOGGER_PATH`` if set; else ``VERL_FILE_LOGGER_ROOT/{project}/{experiment}.jsonl`` if set; else
    ``metrics.jsonl`` in ``trainer.log_dir`` or ``trainer.default_local_dir``; without a config
    ``{project}/{experiment}.jsonl`` here.
    """
    if os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(os.environ["VERL_FILE_LOGGER_PATH"]).expanduser()
    root = os.environ.get("VERL_FILE_LOGGER_ROOT")
    keys = _section(config or {}, "trainer")
    folder = keys.get("log_dir") or keys.get("default_local_dir")
    if folder and not root:
        return Path(folder).expanduser() / "metrics.jsonl"
    return Path(root or ".").expanduser() / project_name / f"{experiment_name}.jsonl"


def tensorboard_folder(project_name: str, experiment_name: str) -> str:
    """Return the folder that the ``tensorboard`` logger writes to: ``TENSORBOARD_DIR``, else a folder of the run."""
    return os.environ.get("TENSORBOARD_DIR") or f"tensorboard_log/{project_name}/{experiment_name}"


def wandb_has_key() -> bool:
    """Whether W&B could log in: a key in the environment, or an entry for its host in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for candidate in candidates:
        path = os.path.expanduser(candidate)
        if not os.path.exists(path):
            continue
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError) as error:
            warn_once(f"wandb: {path} cannot be read ({error}); going on as if it held no key")
    return False


# -- values -----------------------------------------------------------------------------------------------------------


def _as_number(value: Any) -> int | float | None:
    """A Python number, from numpy and torch scalars too; None for anything else."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value
    if isinstance(value, numbers.Number) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0):
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, (int, float)):
            return int(plain) if isinstance(plain, bool) else plain
    return None


def _json_value(value: Any) -> Any:
    number = _as_number(value)
    if number is not None:
        if isinstance(number, float) and not math.isfinite(number):
            return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return number
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return value if value is None or isinstance(value, str) else str(value)


def _section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A nested section, empty if any part of the way is missing."""
    node: Any = config
    for name in names:
        node = node.get(name) if hasattr(node, "get") else None
        if node is None:
            return {}
    return node


def _plain_dict(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options as plain values, secrets masked: who may read a run there need not be its user."""
    return mask(config.to_dict() if hasattr(config, "to_dict") else config)


def _print_generations(samples: Sequence[Sequence[Any]], step: int) -> None:
    for prompt, response, score in samples:
        print(f"[validation, step {step}]\n[prompt] {prompt}\n[response] {response}\n[score] {score}", flush=True)


def _log_wandb_table(wandb: Any, holder: Any, samples: Sequence[Sequence[Any]], step: int) -> None:
    """Add one row (all samples of this step) to the table ``val/generations``."""
    rows = holder.__dict__.setdefault("table_rows", [])
    rows.append([step, *(cell for sample in samples for cell in sample)])
    columns = ["step"]
    for i in range(max((len(row) - 1) // 3 for row in rows)):
        columns += [f"input_{i + 1}", f"output_{i + 1}", f"score_{i + 1}"]
    padded = [row + [None] * (len(columns) - len(row)) for row in rows]
    wandb.log({"val/generations": wandb.Table(columns=columns, data=padded)}, step=step)
