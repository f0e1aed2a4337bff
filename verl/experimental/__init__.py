"""Public names that began as experiments; the code lives elsewhere in the package."""
