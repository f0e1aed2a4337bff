"""Two ranks with megatron-core, which takes seconds to import: one pair for all tests of it."""

import pytest

from tests.support import cuda_shim
from tests.support.ranks import run_ranks


@pytest.fixture(scope="session")
def megatron_ranks(tmp_path_factory):
    """Folders of the models, and what each rank has found."""
    from tests.workers.engine.test_megatron import MODELS, make_folder

    folders = {name: make_folder(name, tmp_path_factory.mktemp(name)) for name in MODELS}
    return folders, run_ranks(2, _found, folders, str(tmp_path_factory.mktemp("saved")), timeout_s=300)


def _found(folders, root):
    cuda_shim.install()
    from tests.workers.engine.test_megatron import run_cases
    from tests.workers.engine.test_megatron_checkpoint import save_and_resume

    return {"engine": run_cases(folders), "checkpoint": save_and_resume(folders, root)}
