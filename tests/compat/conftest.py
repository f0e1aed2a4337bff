import pytest

from tests.support.runs import make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Keys that name a tiny model, prompts and a reward."""
    return make_task(tmp_path_factory.mktemp("task"), rows=16)
