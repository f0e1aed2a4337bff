"""Running code that may hang, crash or run away: child processes with limits, and outcomes with names."""
