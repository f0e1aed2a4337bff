"""A weight sync needs the memory of one bucket, however large the model."""

import weakref

import pytest

from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_contract import ENGINES
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.weights.sync import sync_weights

MEGABYTE = 1 << 20


class Meter:
    """Bytes of the handed out storages that are still alive, and the most there ever were."""

    def __init__(self):
        self.alive = self.peak = 0

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, storage.nbytes())
        return tensor

    def _freed(self, nbytes):
        self.alive -= nbytes


@pytest.mark.parametrize("engine", ENGINES)
def test_the_peak_of_a_sync_is_at_most_one_bucket_and_a_tensor(engine, model_folder, reference):
    rollout = get_rollout_class(engine)(model_folder("wide"), rollout_config(max_num_seqs=4))
    rollout.wake()
    whole = sum(tensor.nbytes for _, tensor in weights_of(reference("wide")))
    largest = max(tensor.nbytes for _, tensor in weights_of(reference("wide")))
    peaks = {}
    for bucket in (MEGABYTE, 12 * MEGABYTE, 1 << 30):
        meter = Meter()
        fresh = ((name, meter.watch(tensor.clone())) for name, tensor in weights_of(reference("wide")))
        sync_weights(fresh, rollout, version=1, bucket_bytes=bucket)
        peaks[bucket] = meter.peak
        assert meter.alive <= largest
    assert largest <= peaks[1 << 30] <= whole
    assert peaks[12 * MEGABYTE] <= 12 * MEGABYTE + largest
    assert peaks[MEGABYTE] <= 2 * largest
