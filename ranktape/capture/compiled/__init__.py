"""Records tensors inside compiled graphs without changing what the graphs compute."""
