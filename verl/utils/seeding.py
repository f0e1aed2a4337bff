"""Seeds that depend on what they are for, and on nothing else."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from all ``parts``: the same in any process, at any number of workers, after any restart.

    The k-th response to a prompt has derive_seed(run seed, purpose, step, prompt, k).
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
