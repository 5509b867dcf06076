"""A LightningModule, which Lightning trains. It knows of no recorder.

RANKTAPE_CAPTURE=runs/lightning python examples/lightning_fit.py    # Lightning starts the ranks
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Two layers, and how they learn."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        features, labels = batch
        return functional.cross_entropy(self.model(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :8].argmax(1)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
