"""Registry of interactions, at the address that verl has it."""
