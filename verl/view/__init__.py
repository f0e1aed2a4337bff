"""Pages and text that show runs: curves, options, warnings and samples. Reads folders of runs and nothing else."""
