"""An engine that the tests of SGLang share."""

import pytest


@pytest.fixture
def awake(built):
    rollout = built("sglang")
    rollout.wake()
    return rollout
