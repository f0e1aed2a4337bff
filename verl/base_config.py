"""Public name of the base class of option classes; users' own sections inherit from it."""

from verl.config.base import Config as BaseConfig

__all__ = ["BaseConfig"]
