"""The documents, arrays and catalogues that a run consists of, as bytes and as values."""
