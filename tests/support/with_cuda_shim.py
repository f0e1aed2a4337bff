"""Named in VERL_USE_EXTERNAL_MODULES: every process of a run installs ``cuda_shim`` before it builds a model."""

from tests.support.cuda_shim import install

install()
