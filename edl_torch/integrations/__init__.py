"""Where edl_torch meets other frameworks: Ray, TensorFlow, Transformers, whatever iterates over records."""
