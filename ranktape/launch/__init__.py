"""Open the doors: start a training with capture under torchrun, the `ranktape` command, the demo."""
