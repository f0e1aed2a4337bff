"""Training engines: one model on one mesh, behind one interface. ``build_engine`` chooses the backend by name."""

from verl.batch import MicroBatching
from verl.models.loader import ModelSpec
from verl.utils.distributed import Topology
from verl.workers.engine.engine import Engine, Gather, LossFn, Outputs, TrainStep, Want
from verl.workers.engine.registry import build_engine, register_engine
from verl.workers.engine.train_step import Reference

__all__ = [
    "Engine",
    "Gather",
    "LossFn",
    "MicroBatching",
    "ModelSpec",
    "Outputs",
    "Reference",
    "Topology",
    "TrainStep",
    "Want",
    "build_engine",
    "register_engine",
]
