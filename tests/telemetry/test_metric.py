import numpy as np
import pytest
import torch

from verl.telemetry.metric import reduce_metrics


def test_lists_become_their_mean_and_extremes_stay_extremes():
    reduced = reduce_metrics(
        {
            "actor/pg_loss": [1.0, 2.0],
            "response_length/max": [3, 5],
            "response_length/min": np.array([3, 5]),
            "actor/kl_max": torch.tensor([1.0, 4.0]),
            "global_seqlen/minmax_diff": [1, 3],
            "one": 2,
        }
    )
    assert reduced == {
        "actor/pg_loss": 1.5,
        "response_length/max": 5,
        "response_length/min": 3,
        "actor/kl_max": 4,
        "global_seqlen/minmax_diff": 2,
        "one": 2,
    }
    assert all(type(value) is float for value in reduced.values())


@pytest.mark.parametrize("values", [[], ["text"], [None]])
def test_what_cannot_be_reduced_is_named(values):
    with pytest.raises(ValueError, match="metric 'actor/x'"):
        reduce_metrics({"actor/x": values})
