"""Models on megatron-core: groups of ranks, modules, weights from and to Hugging Face folders, distributed checkpoints.

The only modules that import ``megatron.core`` and ``mbridge``, besides the engine; they know no batches and no losses.
"""
