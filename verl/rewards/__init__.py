"""All scoring: built-in scorers, the user's functions, and the managers that score a batch with them."""
