"""The mathematics of the algorithms: pure functions on tensors. See README.md for the table of names."""
