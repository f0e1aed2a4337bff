"""Responses of a model that is not trained: generated into a file, scored, or asked for in a terminal."""
