"""Orders of data: file order, shuffled each epoch, mixed by shares, or user-defined.

Row indices only. A sampler saves its position so that a resumed run gets the same rows as an uninterrupted one.
"""

import fnmatch
import inspect
import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.data.rl_dataset import DataError, RLHFDataset, collate_fn
from verl.data.table import leave_out
from verl.data.tokenization import ToolSchemas
from verl.utils.import_utils import load_extern_type


class AbstractSampler(Sampler[int]):
    """Base of samplers named by ``data.sampler.{class_path,class_name}``.

    A sampler whose order changes from epoch to epoch should have ``state_dict``/``load_state_dict``: the state is
    saved at the start of an epoch, and a resumed run iterates again from that state up to the saved position.

    Args:
        data_source: the dataset.
        data_config: the ``data`` section of the config.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]):
        pass


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is updated with every finished batch and may change its order. Needs ``dataloader_num_workers=0``.

    Its ``state_dict``, if it has one, is called when a checkpoint is written and must include the position inside the
    epoch: iterating after ``load_state_dict`` continues from there.
    """

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Learn from a finished batch (DataProto with rewards and advantages)."""


class FileOrderSampler(Sampler[int]):
    """Every row once per epoch, in the order of the files.

    ``rows_of_epoch`` limits the next epoch only. A dataset that grows in the middle of an epoch is used as a whole
    from the next epoch on.
    """

    def __init__(self, data_source: Sized):
        self.data_source = data_source
        self.rows_of_epoch: int | None = None

    def __len__(self) -> int:
        return len(self.data_source) if self.rows_of_epoch is None else self.rows_of_epoch

    def __iter__(self) -> Iterator[int]:
        # for one epoch only
        rows, self.rows_of_epoch = len(self), None
        return iter(self.order(rows))

    def order(self, rows: int) -> Sequence[int]:
        """Return the rows of one epoch."""
        return range(rows)


class ShuffleSampler(FileOrderSampler):
    """Every row once per epoch, in an order that depends on (seed, epoch) alone."""

    def __init__(self, data_source: Sized, seed: int):
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def order(self, rows: int) -> Sequence[int]:
        order = _permutation(rows, self.seed, self.epoch)
        self.epoch += 1
        return order

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.seed = state["epoch"], state["seed"]


class MixtureSampler(Sampler[int]):
    """Rows of several sources, mixed by shares.

    Among the first k rows there are k * share of each source, to within one per source: the source farthest behind
    its share comes next. Within a source every row is used once before any is repeated, in a new order each time. The
    length of an epoch is the total number of rows of all sources.

    Args:
        rows: source -> its rows.
        shares: source -> its share; they add up to 1.
        seed: of the orders within sources; None: the order of the files.
    """

    def __init__(self, rows: Mapping[str, Sequence[int] | np.ndarray], shares: Mapping[str, float], seed: int | None):
        self.names = sorted(name for name in rows if shares[name] > 0)
        self.rows = [np.asarray(rows[name], dtype=np.int64) for name in self.names]
        self.shares = [float(shares[name]) for name in self.names]
        self.seed = seed
        self.taken = [0] * len(self.names)
        self.deficit = [0.0] * len(self.names)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def __iter__(self) -> Iterator[int]:
        order = []
        queues = [self._rows_from(source, taken) for source, taken in enumerate(self.taken)]
        for _ in range(len(self)):
            for source, share in enumerate(self.shares):
                self.deficit[source] += share
            # ties go to the first name in the alphabet, so that the order can be repeated
            source = max(range(len(self.deficit)), key=self.deficit.__getitem__)
            order.append(next(queues[source]))
            self.deficit[source] -= 1
            self.taken[source] += 1
        return iter(order)

    def _rows_from(self, source: int, taken: int) -> Iterator[int]:
        """Yield the rows of a source endlessly, skipping the first ``taken``."""
        rows = self.rows[source]
        turn, start = divmod(taken, len(rows))
        while True:
            order = range(len(rows)) if self.seed is None else _permutation(len(rows), self.seed, turn, source)
            for place in islice(order, start, None):
                yield int(rows[place])
            turn, start = turn + 1, 0

    def state_dict(self) -> dict[str, Any]:
        # the keys "drawn" and "owed" are those of saved checkpoints
        return {"sources": self.names, "drawn": list(self.taken), "owed": list(self.deficit), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was saved; the shares may have changed, the sources may not."""
        if state["sources"] != self.names:
            raise ValueError(
                f"The checkpoint's data.mixture had the sources {', '.join(state['sources'])} and this one has "
                f"{', '.join(self.names)}: its position has no meaning here. Use those sources, or delete data.pt from "
                "the checkpoint to start the data from its beginning."
            )
        self.taken, self.deficit, self.seed = list(state["drawn"]), list(state["owed"]), state["seed"]


def _permutation(rows: int, seed: int, *turn: int) -> list[int]:
    # SeedSequence takes no negative numbers
    state = int(np.random.SeedSequence([abs(seed), int(seed < 0), *turn]).generate_state(1)[0])
    return torch.randperm(rows, generator=torch.Generator().manual_seed(state)).tolist()


class PromptDataset(Protocol):
    """Dataset of prompts: any torch ``Dataset`` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Mapping[str, Any]: ...


class RowSampler(Protocol):
    """Order of the rows of a dataset: any torch ``Sampler`` with a length."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class SkippingBatchSampler(BatchSampler):
    """Batches of a sampler's rows, without the first ``skip_rows`` of the next epoch."""

    def __init__(self, sampler: RowSampler, batch_size: int, drop_last: bool):
        super().__init__(sampler, batch_size, drop_last)
        self.skip_rows = 0

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        skip, self.skip_rows = self.skip_rows, 0
        # consume without keeping
        next(islice(rows, skip, skip), None)
        while batch := list(islice(rows, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


# -- Datasets, samplers and resumable loaders built from the ``data`` section of the configuration -------------------


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


logger = logging.getLogger(__name__)


_DEFAULT_SEED = 1


def build_dataset(
    config: Mapping[str, Any],
    files: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    processor: "ProcessorMixin | None" = None,
    is_train: bool = True,
    max_samples: int = -1,
    tool_schemas: ToolSchemas | None = None,
) -> PromptDataset:
    """Build the dataset over ``files``: :class:`RLHFDataset`, or the class of ``data.custom_cls.{path,name}``.

    Args:
        is_train: use ``data.train_max_samples`` and ``data.datagen``; else ``data.val_max_samples``.
        max_samples: at most this many rows, instead of those options; -1: use the options.
        tool_schemas: of the tools that prompts show; a class of the user's that is no :class:`RLHFDataset` does
            without.

    Raises:
        DataError: with ``truncation=error``, some prompts are too long; lists them now instead of when training
            reaches them.
        TypeError: the user's class is not a torch Dataset.
    """
    dataset_cls = RLHFDataset
    if config.get("custom_cls", None) and config["custom_cls"].get("path", None):
        inherit = "torch.utils.data.Dataset; let it inherit from that or from verl.data.rl_dataset.RLHFDataset"
        dataset_cls = _user_class(config["custom_cls"], "data.custom_cls", "path", "name", Dataset, inherit)
    elif is_train and (config.get("datagen", None) or {}).get("path", None):
        from verl.data.dynamicgen_dataset import DynamicGenDataset

        dataset_cls = DynamicGenDataset
    key = "train_max_samples" if is_train else "val_max_samples"
    most = config.get(key, -1) if max_samples == -1 else max_samples
    arguments = {} if most == -1 else {"max_samples": most}
    parameters = inspect.signature(dataset_cls).parameters
    takes_most = "max_samples" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if arguments and not takes_most:
        raise TypeError(
            f"data.{key}={most}: the class {dataset_cls.__name__} of data.custom_cls takes no max_samples. Let "
            "its __init__ take that argument, or leave the option at -1."
        )
    if tool_schemas is not None and issubclass(dataset_cls, RLHFDataset):
        # prompts are measured within __init__, and that of a user's class need not know this argument
        dataset = dataset_cls.__new__(dataset_cls)
        dataset.tool_schemas = tool_schemas
        initialize: Callable[..., None] = type(dataset).__init__
        initialize(dataset, data_files=files, tokenizer=tokenizer, processor=processor, config=config, **arguments)
    else:
        dataset = dataset_cls(data_files=files, tokenizer=tokenizer, processor=processor, config=config, **arguments)
    # a class of the user's may read other columns
    if type(dataset).__module__.startswith("verl.data."):
        _check_columns(dataset, config)
        _check_prompts(dataset)
    return dataset


def _user_class(section: Mapping[str, Any], key: str, path: str, name: str, base: type, inherit: str) -> Any:
    """Load the class that a section of the configuration names.

    Args:
        path, name: keys of the section.

    Raises:
        TypeError: it is not a subclass of ``base``; ``inherit`` says what to inherit from.
    """
    found = load_extern_type(section[path], section[name])
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise TypeError(f"{key}.{name}={section[name]!r} of {section[path]} is not a subclass of {inherit}.")
    return found


def build_sampler(config: Mapping[str, Any], dataset: PromptDataset, seed: int | None = None) -> RowSampler:
    """Build the training order: ``data.sampler`` or ``data.mixture`` if set, else shuffled with ``data.shuffle``, else
    file order.

    Args:
        seed: used where ``data.seed`` is not set.
    """
    if config.get("sampler", None) and config["sampler"].get("class_path", None):
        inherit = "verl.experimental.dataset.sampler.AbstractSampler; let it inherit from it"
        sampler_cls = _user_class(
            config["sampler"], "data.sampler", "class_path", "class_name", AbstractSampler, inherit
        )
        workers = config.get("dataloader_num_workers", 0)
        if issubclass(sampler_cls, AbstractCurriculumSampler) and workers:
            raise ValueError(
                f"data.dataloader_num_workers={workers} with the curriculum sampler {sampler_cls.__name__}: workers "
                "prefetch rows before the sampler is updated with the last batch. Set data.dataloader_num_workers=0."
            )
        return sampler_cls(data_source=dataset, data_config=config)
    order_seed = _seed(config, seed) if config.get("shuffle", True) else None
    if config.get("mixture", None):
        return MixtureSampler(_rows_by_source(config, dataset), config["mixture"], order_seed)
    return FileOrderSampler(dataset) if order_seed is None else ShuffleSampler(dataset, order_seed)


def _rows_by_source(config: Mapping[str, Any], dataset: PromptDataset) -> dict[str, np.ndarray]:
    """Return source -> its rows for the sources of ``data.mixture``, which must match those of the data."""
    key, shares = config.get("reward_fn_key", "data_source"), config["mixture"]
    table = getattr(dataset, "dataframe", None)
    if not hasattr(table, "column"):
        raise TypeError(
            f"data.mixture={dict(shares)} needs the sources of the rows, and {type(dataset).__name__} has no "
            "dataframe. Let the class inherit from RLHFDataset, or define the order with data.sampler."
        )
    found: dict[str, list[int]] = {}
    for row, source in enumerate(table.column(key)):
        # exact names before patterns
        name = str(source)
        if name not in shares:
            name = next((pattern for pattern in shares if fnmatch.fnmatchcase(name, pattern)), name)
        found.setdefault(name, []).append(row)
    if missing := [name for name, share in shares.items() if share > 0 and name not in found]:
        raise DataError(
            f"data.mixture gives a share to {missing[0]!r}, and no row of data.train_files has that in {key!r} "
            f"(data.reward_fn_key): there are {', '.join(map(repr, found))}. Correct the name or add rows."
        )
    if extra := [name for name in found if name not in shares]:
        raise DataError(
            f"data.mixture does not list {extra[0]!r}, the {key!r} (data.reward_fn_key) of {len(found[extra[0]])} "
            "rows of data.train_files. Give it a share; 0 leaves it out."
        )
    return {name: np.array(rows) for name, rows in found.items()}


def build_train_loader(
    config: Mapping[str, Any],
    dataset: PromptDataset,
    collate_fn: Callable | None = None,
    sampler: RowSampler | None = None,
    seed: int | None = None,
) -> "PromptLoader":
    """Build a loader of ``data.gen_batch_size`` or else ``data.train_batch_size`` prompts; drops a short last batch."""
    key = "gen_batch_size" if config.get("gen_batch_size", None) else "train_batch_size"
    batch_size = config[key]
    if len(dataset) < batch_size:
        raise ValueError(
            f"data.{key}={batch_size} is larger than the {len(dataset)} rows of data.train_files: no batch could be "
            "filled. Lower it or add rows."
        )
    sampler = build_sampler(config, dataset, seed) if sampler is None else sampler
    return PromptLoader(config, dataset, sampler, batch_size, True, collate_fn, _seed(config, seed))


def build_val_loader(
    config: Mapping[str, Any], dataset: PromptDataset, collate_fn: Callable | None = None, seed: int | None = None
) -> "PromptLoader":
    """Build a loader of ``data.val_batch_size`` prompts, or all at once; no prompt is dropped."""
    if len(dataset) == 0:
        raise ValueError("data.val_files holds no prompts (after filtering). Name a file that does.")
    seed = _seed(config, seed)
    sampler = ShuffleSampler(dataset, seed) if config.get("validation_shuffle", False) else FileOrderSampler(dataset)
    batch_size = config.get("val_batch_size", None) or len(dataset)
    return PromptLoader(config, dataset, sampler, batch_size, False, collate_fn, seed)


class PromptLoader(StatefulDataLoader):
    """A loader whose state is a position in the data, independent of the number of worker processes.

    ``load_state_dict(state_dict())`` in a new process continues with exactly the batches that were not returned yet.
    A state taken after the last batch of an epoch continues with the next epoch.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        dataset: PromptDataset,
        sampler: RowSampler,
        batch_size: int,
        drop_last: bool,
        collate: Callable | None,
        seed: int,
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*set_vital", category=UserWarning
            )  # torchdata's, not the user's
            super().__init__(
                dataset,
                batch_size=batch_size,
                sampler=sampler,
                num_workers=config.get("dataloader_num_workers", 8),
                drop_last=drop_last,
                collate_fn=collate or collate_fn,
                worker_init_fn=_start_worker,
                generator=torch.Generator().manual_seed(seed),  # else each epoch would move torch's global generator
            )
        self._batches = SkippingBatchSampler(sampler, batch_size, drop_last)
        self._epoch_state, self._epoch_rows = _state_of(sampler), len(sampler)
        self._rows_given = 0
        self._resume_at = 0

    def check_worker_number_rationality(self) -> None:
        """Silence torch's warning, which it would repeat every epoch: the number of workers is configured."""

    @property
    def _index_sampler(self) -> SkippingBatchSampler:
        """Batch sampler that torch's iterators read."""
        return self._batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self._resume_at = self._resume_at, 0
        if start and start + (self.batch_size if self.drop_last else 1) > len(self.sampler):
            for _ in self.sampler:  # no batch of that epoch is left: advance the sampler to the next epoch
                pass
            start = 0
        self._rows_given = self._batches.skip_rows = start
        self._epoch_state, self._epoch_rows = _state_of(self.sampler), len(self.sampler)
        try:
            # counted when given out: workers prefetch batches that training has not seen
            for batch in super().__iter__():
                self._rows_given += self.batch_size
                yield batch
        finally:
            self.close()
        self._rows_given = 0
        self._epoch_state, self._epoch_rows = _state_of(self.sampler), len(self.sampler)

    def close(self) -> None:
        """End the worker processes; reading begins with new ones.

        Left to the garbage collector, which may close their queues first, each takes five seconds to end.
        """
        iterator = vars(self).get("_iterator")
        self._iterator = None
        if hasattr(iterator, "_shutdown_workers"):  # torch has no public name for it
            iterator._shutdown_workers()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows given out of this epoch, the sampler's state at its start, and the dataset's state."""
        # a curriculum's state is of this moment and holds its position; that of others is of the epoch's start
        keeps_position = isinstance(self.sampler, AbstractCurriculumSampler) and hasattr(self.sampler, "state_dict")
        grown = {"dataset": self.dataset.state_dict()} if hasattr(self.dataset, "state_dict") else {}
        return {
            **grown,
            "epoch_rows": self._epoch_rows,
            "num_rows": len(self.sampler),
            "rows_given": 0 if keeps_position else self._rows_given,
            "sampler": _state_of(self.sampler) if keeps_position else self._epoch_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was saved. The number of rows must not have changed since."""
        if not state:
            return
        if "rows_given" not in state:
            raise ValueError(
                f"A loader state with the keys {', '.join(state)} was not written by this loader. Delete data.pt from "
                "the checkpoint to resume the model and start the data from its beginning."
            )
        if "dataset" in state and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state["dataset"])
        # a position in other data would skip and repeat rows silently
        if state["num_rows"] != len(self.sampler):
            raise ValueError(
                f"The checkpoint's loader had {state['num_rows']} rows and this one has {len(self.sampler)}: its "
                "position has no meaning here. Use the data and filters of that run, or delete data.pt from the "
                "checkpoint to start the data from its beginning."
            )
        if state["sampler"] is not None and hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state["sampler"])
        elif state["sampler"] is not None:
            self.sampler.generator.set_state(state["sampler"]["generator"])
        elif isinstance(self.sampler, AbstractCurriculumSampler):
            logger.warning(
                "%s has no state_dict: its order after resuming ignores the batches before.",
                type(self.sampler).__name__,
            )
        self._rows_given = self._resume_at = state["rows_given"]
        self._epoch_state, self._epoch_rows = state["sampler"], state.get("epoch_rows", len(self.sampler))
        if self._resume_at and isinstance(self.sampler, FileOrderSampler):
            self.sampler.rows_of_epoch = self._epoch_rows  # rows added since are used from the next epoch on


def _state_of(sampler: Any) -> Any:
    """Return a copy of the sampler's state, of torch's random sampler that of its generator, else ``None``."""
    if hasattr(sampler, "state_dict"):
        return dict(sampler.state_dict())
    generator = getattr(sampler, "generator", None)
    return {"generator": generator.get_state()} if isinstance(generator, torch.Generator) else None


def _start_worker(worker_id: int) -> None:
    """Keep a forked worker from using the tokenizer's thread pool: its threads exist only in the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _seed(config: Mapping[str, Any], seed: int | None) -> int:
    own = config.get("seed", None)
    return own if own is not None else _DEFAULT_SEED if seed is None else seed


def _check_columns(dataset: RLHFDataset, config: Mapping[str, Any]) -> None:
    """Warn about columns that rule-based rewards read; a user-defined reward may not need them."""
    columns = dataset.dataframe.column_names
    missing = [name for name in (config.get("reward_fn_key", "data_source"), "reward_model") if name not in columns]
    if missing:
        logger.warning(
            "%s: no column %s (there are: %s). The built-in reward managers read a row's data source "
            "(data.reward_fn_key) and reward_model.ground_truth, of CSV a column of that name: docs/data_format.md.",
            ", ".join(map(str, dataset.data_files)),
            " and no column ".join(map(repr, missing)),
            ", ".join(columns),
        )


def _check_prompts(dataset: RLHFDataset) -> None:
    """Render every prompt once before training, so that prompts the chat template refuses are reported now."""
    was_rendered = dataset.filter_overlong_prompts or dataset.bad_rows == "skip"
    if dataset.truncation != "error" and not was_rendered:
        leave_out(dataset.dataframe, dataset.find_unrenderable())
    overlong = dataset.find_overlong() if dataset.truncation == "error" else []
    if overlong:
        examples = "; ".join(f"{where} has {length} tokens" for where, length in overlong[:5])
        raise DataError(
            f"{len(overlong)} of {len(dataset)} prompts are longer than data.max_prompt_length="
            f"{dataset.max_prompt_length} ({examples}{'; ...' if len(overlong) > 5 else ''}). Raise it, or set "
            "data.filter_overlong_prompts=True to leave them out, or data.truncation to left, right or middle to "
            "truncate them."
        )
