"""Address of verl's fully asynchronous trainer: the main job whose engines generate all the time."""
