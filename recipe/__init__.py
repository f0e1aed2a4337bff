"""Recipes of this package, and of other folders called ``recipe`` on the path."""

import pkgutil

import verl  # noqa: F401 - which names those of verl's recipes that are not here

__path__ = pkgutil.extend_path(__path__, __name__)
