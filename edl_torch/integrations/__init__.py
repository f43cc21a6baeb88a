"""Where edl_torch meets other frameworks: Ray, TensorFlow, and whatever takes an iterable of records."""
