"""RecordIO files of both dialects: read, written, converted to."""
