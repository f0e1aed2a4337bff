"""Trackers of others behind the interface of `verl.telemetry.tracking`: TensorBoard, Weights & Biases, MLflow, SwanLab,
ClearML, Trackio and Aim.

Each imports its package when it is opened. Configurations go out with secrets masked; who has no key for a service gets
files that can be sent later. Signs of trouble are exceptions here: the thread that calls these methods counts them.
"""

from __future__ import annotations

import math
import netrc
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from verl.telemetry.tracking import Backend, as_number, import_for, plain_config, register_backend
from verl.utils.process import warn_once


@register_backend("tensorboard")
class TensorboardBackend(Backend):
    """Event files in ``TENSORBOARD_DIR``, default ``tensorboard_log/{project}/{experiment}``."""

    @classmethod
    def check(cls) -> None:
        import_for("tensorboard", "tensorboard", "tensorboard")

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], log_dir: str | None = None
    ) -> None:
        self.check()
        module = import_for("tensorboard", "torch.utils.tensorboard", "tensorboard")
        self.folder = log_dir or tensorboard_folder(project_name, experiment_name)
        os.makedirs(self.folder, exist_ok=True)
        self.writer = module.SummaryWriter(self.folder)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in data.items():
            number = as_number(value)
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
        import_for("wandb", "wandb", "wandb")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        self.wandb = import_for("wandb", "wandb", "wandb")
        options: dict[str, Any] = {"project": project_name, "name": experiment_name, "config": plain_config(config)}
        proxy = (config.get("trainer") or {}).get("wandb_proxy")
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
        log_wandb_table(self.wandb, self, samples, step)

    def finish(self) -> None:
        self.run.finish(exit_code=int(self.failed))


@register_backend("mlflow")
class MlflowBackend(Backend):
    """A run in the MLflow experiment named like the project, where ``MLFLOW_TRACKING_URI`` says, or MLflow's default.

    Options are parameters, ``section/key``, and the file ``config.json``; validation samples tables, a file a step.
    MLflow allows no ``@`` in names: ``mean@1`` is ``mean_at_1`` there.

    Args:
        run_id: of a run to go on with; default ``MLFLOW_RUN_ID``. Its parameters stay as they are.
        kwargs: of ``MlflowClient.create_run``, ``tags`` for example.
    """

    @classmethod
    def check(cls) -> None:
        import_for("mlflow", "mlflow", "mlflow")

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        mlflow = import_for("mlflow", "mlflow", "mlflow")
        self.entities = import_for("mlflow", "mlflow.entities", "mlflow")
        self.client = mlflow.MlflowClient()
        self.run_id = run_id or os.environ.get("MLFLOW_RUN_ID") or ""
        if self.run_id:
            return
        found = self.client.get_experiment_by_name(project_name)
        experiment = self.client.create_experiment(project_name) if found is None else found.experiment_id
        self.run_id = self.client.create_run(experiment, run_name=experiment_name, **kwargs).info.run_id
        options = plain_config(config)
        params = [self.entities.Param(name, value[:6000]) for name, value in _flat(options)]
        for first in range(0, len(params), 100):  # the most that a call may have
            self.client.log_batch(self.run_id, params=params[first : first + 100])
        if options:
            self.client.log_dict(self.run_id, options, "config.json")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(_mlflow_name(name), value, now, step) for name, value in _numbers(data)]
        for first in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics=metrics[first : first + 1000])

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        self.client.log_table(self.run_id, _columns(samples, step), f"val_generations/{step}.json")

    def finish(self) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if self.failed else "FINISHED")


@register_backend("swanlab")
class SwanlabBackend(Backend):
    """SwanLab. Offline without a key, and as ``SWANLAB_MODE`` says; offline runs are sent later with ``swanlab sync``.

    Files lie in ``SWANLAB_LOG_DIR``, default ``swanlog``. Validation samples are texts.

    Args:
        kwargs: of ``swanlab.init``.
    """

    @classmethod
    def check(cls) -> None:
        import_for("swanlab", "swanlab", "swanlab")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        self.swanlab = import_for("swanlab", "swanlab", "swanlab")
        options: dict[str, Any] = {"project": project_name, "experiment_name": experiment_name}
        options["config"] = {"FRAMEWORK": "verl", **plain_config(config)}
        options["logdir"] = os.environ.get("SWANLAB_LOG_DIR", "swanlog")
        if os.environ.get("SWANLAB_MODE"):
            options["mode"] = os.environ["SWANLAB_MODE"]
        options.update(kwargs)
        if api_key := options.pop("api_key", None) or os.environ.get("SWANLAB_API_KEY"):
            self.swanlab.login(api_key=api_key)
        elif "mode" not in options and not any((base / ".swanlab/.netrc").exists() for base in (Path(), Path.home())):
            options["mode"] = "offline"
            warn_once(
                "swanlab: no API key is configured, so this run is logged offline under swanlog (send it later with "
                "`swanlab sync`). Run `swanlab login` or set SWANLAB_API_KEY to log online."
            )
        self.run = self.swanlab.init(**options)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(_numbers(data)), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        texts = [
            self.swanlab.Text(f"input: {prompt}\n\noutput: {response}\n\nscore: {score}", caption=f"{i}")
            for i, (prompt, response, score) in enumerate(samples, 1)
        ]
        if texts:
            self.run.log({"val/generations": texts}, step=step)

    def finish(self) -> None:
        self.run.finish(state="crashed" if self.failed else "success", error="see run.log" if self.failed else None)


@register_backend("clearml")
class ClearmlBackend(Backend):
    """A ClearML task. Offline without credentials (``clearml.conf`` or ``CLEARML_API_ACCESS_KEY``).

    Neither command line, terminal, machine nor frameworks are watched; ``tracker_kwargs.clearml`` may ask for it with
    the arguments of ``Task.init``. ClearML shows no number that is not finite: those are left out.
    """

    @classmethod
    def check(cls) -> None:
        import_for("clearml", "clearml", "clearml")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        clearml = import_for("clearml", "clearml", "clearml")
        options = {"project_name": project_name, "task_name": experiment_name, "output_uri": False}
        switches = ["reuse_last_task_id", "auto_resource_monitoring"]
        switches += [f"auto_connect_{what}" for what in ("frameworks", "arg_parser", "streams")]
        options |= dict.fromkeys(switches, False)
        conf = Path(os.environ.get("CLEARML_CONFIG_FILE", "~/clearml.conf")).expanduser()
        if not (conf.exists() or {"CLEARML_API_ACCESS_KEY", "CLEARML_OFFLINE_MODE"} & os.environ.keys()):
            warn_once(
                "clearml: no credentials are configured, so this task is kept offline (its zip is sent later with "
                "`clearml-task --import-offline-session`). Run `clearml-init` to log online."
            )
            clearml.Task.set_offline(True)
        self.task = clearml.Task.init(**{**options, **kwargs})
        self.task.set_repo()  # waits until the command line, whose secrets are hidden meanwhile, has been read
        self.task.connect_configuration(plain_config(config), name="config")
        self.logger = self.task.get_logger()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in _numbers(data):
            title, _, series = name.partition("/")
            if math.isfinite(value):
                self.logger.report_scalar(title, series or title, value, step)
            else:
                warn_once(f"clearml shows no value that is not finite: {name} is {value} at step {step}", key=name)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        columns = _columns(samples, step)
        rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
        self.logger.report_table("val/generations", "samples", iteration=step, table_plot=rows)

    def finish(self) -> None:
        if self.failed:
            self.task.mark_failed(status_reason="see run.log", force=True)
        self.task.close()


@register_backend("trackio")
class TrackioBackend(Backend):
    """Trackio: files below ``TRACKIO_DIR``, shown by ``trackio show``; with ``space_id`` a Space of Hugging Face's.

    Args:
        kwargs: of ``trackio.init``.
    """

    @classmethod
    def check(cls) -> None:
        import_for("trackio", "trackio", "trackio")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        self.trackio = import_for("trackio", "trackio", "trackio")
        options = {"project": project_name, "name": experiment_name, "config": plain_config(config)}
        self.run = self.trackio.init(**{**options, **kwargs})

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(_numbers(data)), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        columns = _columns(samples, step)
        rows = list(map(list, zip(*columns.values(), strict=True)))
        self.run.log({"val/generations": self.trackio.Table(columns=list(columns), data=rows)}, step=step)

    def finish(self) -> None:
        self.run.finish()


@register_backend("aim")
class AimBackend(Backend):
    """A run in an Aim repository: ``.aim`` here, or ``tracker_kwargs.aim.repo``; shown by ``aim up``.

    The terminal, the system and the environment are not recorded unless ``kwargs``, those of ``aim.Run``, ask for it.
    """

    @classmethod
    def check(cls) -> None:
        import_for("aim", "aim", "aim")

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any], **kwargs: Any) -> None:
        self.aim = import_for("aim", "aim", "aim")
        quiet = {"capture_terminal_logs": False, "system_tracking_interval": None, "log_system_params": False}
        self.run = self.aim.Run(**{"experiment": project_name, **quiet, **kwargs})
        self.run.name = experiment_name
        self.run["config"] = plain_config(config)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in _numbers(data):
            self.run.track(value, name=name, step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        texts = [self.aim.Text(f"input: {a}\n\noutput: {b}\n\nscore: {score}") for a, b, score in samples]
        if texts:
            self.run.track(texts, name="val/generations", step=step)

    def finish(self) -> None:
        self.run.close()


# -- addresses and keys ----------------------------------------------------------------------------------------------
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


def _numbers(data: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Names and values of what is a number."""
    for name, value in data.items():
        if (number := as_number(value)) is not None:
            yield name, number


def _columns(samples: Sequence[Sequence[Any]], step: int) -> dict[str, list]:
    """A table of samples, one a row, as columns."""
    inputs, outputs, scores = ([sample[i] for sample in samples] for i in range(3))
    return {"step": [step] * len(samples), "input": inputs, "output": outputs, "score": scores}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``section/key`` and text of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield _mlflow_name(f"{prefix}{name}"), str(value)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def log_wandb_table(wandb: Any, holder: Any, samples: Sequence[Sequence[Any]], step: int) -> None:
    """Add one row (all samples of this step) to the table ``val/generations``."""
    rows = holder.__dict__.setdefault("table_rows", [])
    rows.append([step, *(cell for sample in samples for cell in sample)])
    columns = ["step"]
    for i in range(max((len(row) - 1) // 3 for row in rows)):
        columns += [f"input_{i + 1}", f"output_{i + 1}", f"score_{i + 1}"]
    padded = [row + [None] * (len(columns) - len(row)) for row in rows]
    wandb.log({"val/generations": wandb.Table(columns=columns, data=padded)}, step=step)
