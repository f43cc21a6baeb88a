"""Where edl_torch meets other frameworks, and the programs that start and watch training jobs."""
