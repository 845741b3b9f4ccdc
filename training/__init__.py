"""From a recipe and a dataset to a run folder."""
