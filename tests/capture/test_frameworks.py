"""Trainings that frameworks run are captured whole, and come to the same weights, bit for bit.

Tiny models with random weights: nothing is downloaded. A framework that is not installed is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.capture.verify import verify_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS, BATCH, LENGTH, VOCABULARY = 2, 2, 6, 40
NUM_LAYERS, LINEARS = 2, 7 * 2 + 1

# The frameworks warn of one another.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

Train = Callable[[nn.Module, Path], None]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def loader_of(rows: list[dict[str, torch.Tensor]]) -> Any:
    data: Any = rows
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def hugging_face(model: nn.Module, folder: Path) -> None:
    arguments = trainer_options(transformers.TrainingArguments, folder)
    transformers.Trainer(model=model, args=arguments, train_dataset=batches()).train()


def trainer_options(kind: Any, folder: Path, **options: Any) -> Any:
    return kind(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )


def with_accelerate(model: nn.Module, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(batches())
    prepared, stepping, fed = accelerator.prepare(model, optimizer, loader)
    for batch in fed:
        accelerator.backward(prepared(**batch).loss)
        stepping.step()
        stepping.zero_grad()


def with_lightning(model: nn.Module, folder: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # without types
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), loader_of(batches()))


def with_trl(model: nn.Module, folder: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    data = datasets.Dataset.from_list([{"input_ids": one["input_ids"].tolist()} for one in batches()])
    arguments = trainer_options(trl.SFTConfig, folder)
    trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()


def trained(train: Train, make: Callable[[], nn.Module], folder: Path, *, capture: Capture | None) -> list[bytes]:
    """The bits of the weights after a training from the same seed."""
    model = make()
    torch.manual_seed(0)
    with capture or contextlib.nullcontext():
        train(model, folder)
    return [weight.detach().cpu().numpy().tobytes() for weight in model.parameters()]


def lora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(llama(), config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("train", "make", "num_products"),
    [
        pytest.param(hugging_face, llama, LINEARS, id="HF Trainer"),
        pytest.param(with_accelerate, llama, LINEARS, id="accelerate"),
        pytest.param(with_lightning, llama, LINEARS, id="Lightning"),
        # Its loss takes the weight of the output layer and computes with it in pieces.
        pytest.param(with_trl, llama, LINEARS - 1, id="TRL SFT"),
        # Two adapters of two products each in every layer.
        pytest.param(with_accelerate, lora, LINEARS + 4 * NUM_LAYERS, id="PEFT LoRA"),
    ],
)
def test_a_framework_trains_as_it_does_without_a_capture(
    train: Train, make: Callable[[], nn.Module], num_products: int, tmp_path: Path
) -> None:
    plain = trained(train, make, tmp_path / "plain", capture=None)
    url = tmp_path / "run"
    captured = trained(train, make, tmp_path / "captured", capture=Capture(url, min_iterations=STEPS))
    assert captured == plain
    run = open_run(url)
    assert run.iterations == list(range(STEPS))
    said = {} if num_products >= LINEARS else {0: {"lm_head": "its module was not called"}}
    assert [status.silent_sites for status in run.status()] == [said] * STEPS
    counts = verify_run(run)
    assert counts["output"] == STEPS * num_products
    assert counts["attention grad_query"] == STEPS * NUM_LAYERS
