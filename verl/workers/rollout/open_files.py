"""How many connections a process may hold open."""

from __future__ import annotations

from contextlib import suppress


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what the system grants: a request under way is a connection."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit, a container may forbid the change
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))
