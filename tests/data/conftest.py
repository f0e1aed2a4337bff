import pytest

from verl.utils.tiny_model import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, with a chat template."""
    return make_tokenizer("byte")
