"""Attention over packed rows, and over sequences that several ranks share."""
