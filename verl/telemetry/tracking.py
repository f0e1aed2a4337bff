"""Metric trackers: the console, a JSONL file, services of others (`verl.telemetry.trackers`), or one of your own.

Names are ``trainer.logger``. Knows numbers and steps, not what they mean. What may be slow or fail, everything but the
console and the file, is called in a thread of its own: it neither stops nor slows a run.
"""

from __future__ import annotations

import atexit
import difflib
import importlib
import json
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from verl.compat import NotBuilt
from verl.telemetry.delivery import Delivery
from verl.telemetry.run_record import METRICS, mask, mask_text
from verl.utils.process import get_logger, warn_once

logger = get_logger(__name__)


class Backend:
    """One backend of metrics. A subclass defines ``log``; the rest is optional.

    All methods are called in one thread, which is not the main one unless ``is_local``.
    """

    is_local = False
    """Whether it only prints or writes to the disk: then it is called at once, by whoever logs."""

    failed = False
    """Whether an error ended the run; set before ``finish``."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Open it. ``kwargs`` are ``trainer.tracker_kwargs.<name>``."""

    @classmethod
    def check(cls) -> None:
        """Raise ImportError if a package it needs is missing; called before anything slow is started."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step. An exception is reported once, and the run goes on."""
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
    for name in _as_list(names):
        getattr(_get_backend(name), "check", lambda: None)()


def known_backends() -> list[str]:
    from verl.telemetry import trackers  # noqa: F401  (registers them)

    return sorted(_BACKENDS)


def _get_backend(name: str) -> BackendFactory:
    if name == "tracking":
        warn_once("trainer.logger: 'tracking' is the old name of 'wandb' and will go away; write wandb")
        name = "wandb"
    known = known_backends()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"trainer.logger={name!r} is not a known logger. Known: {', '.join(known)}.{hint} "
            "A logger of your own is made known with verl.telemetry.tracking.register_backend."
        )
    return _BACKENDS[name]


def import_for(option: str, module: str, package: str) -> Any:
    """Import what logger ``option`` needs; if it is missing, raise with the option and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"trainer.logger={option} needs the package {package}, which cannot be imported ({error}). "
            f"Install it with `pip install {package}`, or take {option} out of trainer.logger."
        ) from error


OPENING_S = 20.0
"""Seconds a run waits at its start for trackers to open; slower ones open while it goes on."""
FAILED_S = 15.0
"""Most seconds a run that an error ended gives its trackers."""


class Tracking:
    """Sends every step's metrics to all chosen loggers, without waiting for those of others.

    Args:
        project_name, experiment_name: name the run in every backend.
        default_backend: one name or several; see ``known_backends()``.
        config: the run's options; stored by backends that show them, with secrets masked.
            ``trainer.tracker_kwargs.<name>`` in it goes to backend ``<name>``.

    Attributes:
        logger: name -> backend, of those that are open.

    Raises:
        ValueError: unknown name.
        ImportError: a chosen backend's package is missing.
        TypeError: one of ``tracker_kwargs`` is no argument of its backend.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        names = _as_list(default_backend)
        config = config or {}
        options = dict(_section(config, "trainer", "tracker_kwargs"))
        factories = {name: _get_backend(name) for name in dict.fromkeys(names)}
        unused = sorted(set(options) - set(factories))
        if unused:
            warn_once(f"trainer.tracker_kwargs.{unused[0]} has no effect: {unused[0]} is not in trainer.logger={names}")
        self.timeout = float(_section(config, "trainer").get("tracker_timeout", 60.0))
        self.logger: dict[str, Backend] = {}
        self._deliveries: dict[str, Delivery] = {}
        for name, factory in factories.items():
            getattr(factory, "check", lambda: None)()
            kwargs = dict(options.get(name) or {})
            open_tracker = partial(factory, project_name, experiment_name, config, **kwargs)
            if getattr(factory, "is_local", False):
                self.logger[name] = open_tracker()
            else:
                self._deliveries[name] = Delivery(name, open_tracker)
        self._wait_until_open()
        # after their own hooks for the end of the process, so that this one is called first
        atexit.register(self.finish)

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + OPENING_S
        for name, delivery in self._deliveries.items():
            delivery.is_opened.wait(max(0.0, deadline - time.monotonic()))
            if isinstance(delivery.error, (ImportError, TypeError)):
                raise delivery.error  # a wrong setting, and nothing has been computed yet
            if delivery.error is not None:
                logger.warning(
                    "trainer.logger=%s cannot be opened (%s: %s). The run goes on without it; `file` in trainer.logger "
                    "keeps its metrics in the run's folder.",
                    name, type(delivery.error).__name__, mask_text(str(delivery.error)),
                )  # fmt: skip
            elif delivery.backend is None:
                logger.warning("trainer.logger=%s takes over %.0f s to open; the run goes on.", name, OPENING_S)
            else:
                self.logger[name] = delivery.backend

    def log(self, data: Mapping[str, Any], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Send ``data`` to all backends, or to those named."""
        self._call("log", dict(data), step, backend)

    def log_generations(
        self, samples: Sequence[Sequence[Any]], step: int, backend: str | Sequence[str] | None = None
    ) -> None:
        """Show validation samples, each (input, output, score), in all backends, or in those named."""
        self._call("log_generations", list(samples), step, backend)

    def _call(self, method: str, content: Any, step: int, backend: str | Sequence[str] | None) -> None:
        chosen = None if backend is None else {"wandb" if name == "tracking" else name for name in _as_list(backend)}
        for name, instance in self.logger.items():
            if name not in self._deliveries and (chosen is None or name in chosen):
                getattr(instance, method)(content, step)
        for name, delivery in self._deliveries.items():
            if chosen is None or name in chosen:
                delivery.put(method, content, step)

    def finish(self, failed: bool = False) -> None:
        """Send what waits, and close all backends, within ``trainer.tracker_timeout``; again it does nothing.

        Args:
            failed: whether an error ended the run; shown by backends that know it.
        """
        atexit.unregister(self.finish)
        backends, self.logger = self.logger, {}
        deliveries, self._deliveries = self._deliveries, {}
        for name, instance in backends.items():
            if name not in deliveries:
                instance.failed = failed
                instance.finish()
        deadline = time.monotonic() + (min(self.timeout, FAILED_S) if failed else self.timeout)
        for delivery in deliveries.values():
            delivery.end(failed)
        for delivery in deliveries.values():
            delivery.wait(deadline)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.finish(failed=kind is not None)


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
        if self.tracking is not None:
            self.tracking.log_generations(samples, step, loggers)
            return
        for name in _as_list(loggers):
            if name in ("wandb", "tracking"):
                self.log_generations_to_wandb(samples, step)
            elif name == "console":
                print_generations(samples, step)

    def log_generations_to_wandb(self, samples: Sequence[Sequence[Any]], step: int, wandb: Any = None) -> None:
        """Add the samples to a table of W&B's running run."""
        from verl.telemetry.trackers import log_wandb_table

        log_wandb_table(wandb or import_for("wandb", "wandb", "wandb"), self, samples, step)

    def _log_to(self, backend: str, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Show the samples in a backend that this object opens by its project and experiment, once."""
        opened = self.__dict__.setdefault("opened", {})
        if backend not in opened:
            opened[backend] = _get_backend(backend)(self.project_name, self.experiment_name, {})
        opened[backend].log_generations(samples, step)

    log_generations_to_tensorboard = partialmethod(_log_to, "tensorboard")
    log_generations_to_mlflow = partialmethod(_log_to, "mlflow")
    log_generations_to_swanlab = partialmethod(_log_to, "swanlab")
    log_generations_to_clearml = partialmethod(_log_to, "clearml")

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
        number = as_number(value)
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
    texts = {name: f"{name}:{_rounded(number)}" for name in data if (number := as_number(data[name])) is not None}
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

    is_local = True

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
        print_generations(samples, step)


@register_backend("file")
class FileBackend(Backend):
    """JSON lines: ``{"step": N, "data": {...}}``, appended, so that a resumed run goes on in the same file.

    Not-a-number and infinities become the strings "NaN", "Infinity" and "-Infinity", since JSON has no such numbers.
    Lines that a full disk refuses are kept, and written before the next one.
    """

    is_local = True

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        path: str | None = None,
    ) -> None:
        self.path = Path(path).expanduser() if path else metrics_file(project_name, experiment_name, config)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten = b""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._write({"step": step, "data": {name: _json_value(value) for name, value in data.items()}})

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        self._write({"step": step, "generations": [[_json_value(cell) for cell in sample] for sample in samples]})

    def _write(self, record: Mapping[str, Any]) -> None:
        self.unwritten += (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            warn_once(f"trainer.logger=file: {self.path} cannot be written ({error}); its lines wait until it can")

    def finish(self) -> None:
        self.file.close()
        if count := self.unwritten.count(b"\n"):
            logger.warning("trainer.logger=file: %d lines could not be written to %s.", count, self.path)


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
        return Path(folder).expanduser() / METRICS
    return Path(root or ".").expanduser() / project_name / f"{experiment_name}.jsonl"


# -- values -----------------------------------------------------------------------------------------------------------


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def as_number(value: Any) -> int | float | None:
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
    number = as_number(value)
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


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options as plain values, secrets masked: who may read a run there need not be its user."""
    return mask(config.to_dict() if hasattr(config, "to_dict") else config)


def print_generations(samples: Sequence[Sequence[Any]], step: int) -> None:
    for prompt, response, score in samples:
        print(f"[validation, step {step}]\n[prompt] {prompt}\n[response] {response}\n[score] {score}", flush=True)
