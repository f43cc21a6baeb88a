"""Where edl_torch meets the programs that start and watch training jobs."""
