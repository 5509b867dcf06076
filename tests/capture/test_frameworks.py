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
from tests.capture.hugging_face import NUM_LAYERS, tiny
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive_but

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS, BATCH, LENGTH, VOCABULARY = 2, 2, 6, 40
LINEARS = 7 * NUM_LAYERS + 1

# The frameworks warn of one another.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

Train = Callable[[nn.Module, Path], None]


def llama() -> Any:
    torch.manual_seed(0)
    return tiny("Llama")


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


def tokenizer_of_words() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="</s>")


def with_dpo(model: nn.Module, folder: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    # All of one length: a mask is not recorded, and the attention could not be computed again.
    rows = [{"prompt": "w3 w4", "chosen": f" w{row + 5} w6", "rejected": " w7 w8"} for row in range(STEPS * BATCH)]
    arguments = trainer_options(trl.DPOConfig, folder, max_length=LENGTH)
    data = datasets.Dataset.from_list(rows)
    trl.DPOTrainer(
        model=model, ref_model=llama(), args=arguments, train_dataset=data, processing_class=tokenizer_of_words()
    ).train()


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
        pytest.param(with_lightning, llama, LINEARS, id="Lightning"),
        # Its loss takes the weight of the output layer and computes with it in pieces; the reference model runs without
        # gradients, and is not recorded.
        pytest.param(with_dpo, llama, LINEARS - 1, id="TRL DPO"),
        # Two adapters of two products each in every layer.
        pytest.param(with_accelerate, lora, LINEARS + 4 * NUM_LAYERS, id="PEFT LoRA"),
    ],
)
@exhaustive_but("HF Trainer", reason="one framework is in make test")
def test_a_framework_trains_as_it_does_without_a_capture(
    train: Train, make: Callable[[], nn.Module], num_products: int, tmp_path: Path
) -> None:
    plain = trained(train, make, tmp_path / "plain", capture=None)
    url = tmp_path / "run"
    captured = trained(train, make, tmp_path / "captured", capture=Capture(url, min_iterations=STEPS))
    assert captured == plain
    run = open_run(url)
    assert run.iterations == list(range(STEPS))
    used = "its module was not called, and its weight was used without it"
    unseen = {"lm_head": used, "lm_head.weight (Linear)": f"no hook sees it: {used}: 12 % of the model's weights"}
    said = {} if num_products >= LINEARS else {0: unseen}
    assert [status.silent_sites for status in run.status()] == [said] * STEPS
    counts = verify_run(run)
    assert counts["output"] == STEPS * num_products
    assert counts["attention grad_query"] == STEPS * NUM_LAYERS


def text() -> dict[str, torch.Tensor]:
    rows = torch.stack([one["input_ids"] for one in batches()[:BATCH]])
    return {"input_ids": rows, "labels": rows}


def model_of(name: str) -> Any:
    if name == "minGPT":
        return MinGPT(), text()
    if name == "ViT":
        inputs = {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": torch.tensor([0, 2])}
    elif name == "Whisper":
        inputs = {"input_features": torch.randn(BATCH, 8, 16), "labels": text()["labels"]}
    else:
        inputs = text()
    return tiny(name), inputs


class ByHand(nn.Module):
    """A layer as minGPT writes it: one product for query, key and value, and attention in matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.norms[0](hidden))
        return hidden + self.mlp(self.norms[1](hidden))  # type: ignore[no-any-return]


class CausalSelfAttention(nn.Module):
    """Its attention, with a buffer for the mask."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril() == 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.c_attn(hidden).view(BATCH, LENGTH, 3, 2, 8).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        scores = (query @ key.transpose(-2, -1) / 8**0.5).masked_fill(self.mask, -torch.inf)
        mixed = scores.softmax(-1) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(BATCH, LENGTH, 16))  # type: ignore[no-any-return]


class MinGPT(nn.Module):
    """Two such layers, with positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(ByHand() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.words(input_ids) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        return transformers.utils.ModelOutput(
            loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        )


def stepped(name: str, *, capture: Capture | None) -> tuple[list[str], list[bytes]]:
    """The bits of losses and weights of some steps."""
    torch.manual_seed(0)
    model, batch = model_of(name)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    losses = []
    with capture or contextlib.nullcontext():
        for _ in range(STEPS):
            loss = model(**batch).loss
            losses.append(loss.item().hex())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, [weight.detach().numpy().tobytes() for weight in model.parameters()]


UNSEEN = "no hook sees it: {} % of the model's weights"


@pytest.mark.parametrize(
    ("name", "scale", "counts", "said"),
    [
        # In each layer four products of attention, the router, and the experts in two products.
        ("Qwen3Moe", None, {"output": 5 * 2 + 1, "grouped output": 4, "attention output": 2}, {}),
        ("DeepseekV3", None, {"output": 18, "grouped output": 2, "attention output": 2}, {}),
        (
            "ViT",
            None,
            {"output": 13, "attention output": 2},
            {
                "vit.embeddings.patch_embeddings.projection.weight (Conv2d)": UNSEEN.format(17),
                "vit.embeddings.position_embeddings (ViTEmbeddings)": UNSEEN.format(1),
            },
        ),
        # Self-attention of each layer, and the decoder's of the encoder; the query is scaled before.
        (
            "Whisper",
            1.0,
            {"output": 2 * 6 + 2 * 10 + 1, "attention output": 6},
            {f"model.encoder.conv{number}.weight (Conv1d)": UNSEEN.format(3 * number) for number in (1, 2)},
        ),
        (
            "minGPT",
            None,
            {"output": 9, "attention output": 2},
            {},
        ),
    ],
    ids=["Qwen3Moe", "DeepseekV3", "ViT", "Whisper", "minGPT"],
)
@exhaustive_but("minGPT", reason="one model is in make test; others are in tests/capture/test_roles_huggingface.py")
def test_a_model_is_recorded_whole_and_what_is_not_seen_is_named(  # noqa: PLR0917 - a row of a table
    name: str,
    scale: float | None,
    counts: dict[str, int],
    said: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = tmp_path / "run"
    captured = stepped(name, capture=Capture(url, min_iterations=STEPS))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ranktape: ")]
    assert captured == stepped(name, capture=None)
    run = open_run(url)
    assert run.verdict().met
    for status in run.status():
        told = {place: reason.partition(" (docs")[0] for place, reason in status.silent_sites.get(0, {}).items()}
        assert (status.state, told) == ("complete", said)
    warned = [line for line in lines if line.startswith("ranktape: warning: not recorded: ")]
    assert len(warned) == len(said) == len([line for line in lines if "warning" in line])
    assert all(any(place in line for line in warned) for place in said)
    found = verify_run(run, scale=scale)
    assert {kind: found[kind] for kind in counts} == {kind: STEPS * count for kind, count in counts.items()}
    assert found["attention grad_query"] == found["attention output"]
    assert found["grouped grad_weight"] == found["grouped output"]
    assert found["grad_weight"] == found["output"]
