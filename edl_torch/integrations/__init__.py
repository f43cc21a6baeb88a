"""Where edl_torch meets the programs that start and watch training jobs. Each module stands for one of them."""
