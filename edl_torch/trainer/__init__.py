"""What a trainer knows and decides of one dataset: pure, with the time and every answer as arguments."""
