"""Read a run back and say what overflows, what underflows, and which format and scale each tensor can bear."""
