"""Addresses of verl's experimental programs."""
