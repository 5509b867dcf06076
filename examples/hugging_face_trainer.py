"""Hugging Face's Trainer and a small Llama; nothing is downloaded. It knows of no recorder.

torchrun --nproc-per-node 2 -m ranktape.launch --capture runs/trainer --every 5 examples/hugging_face_trainer.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    texts = torch.randint(256, (64, 32))
    arguments = TrainingArguments(
        "out",
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    data = [{"input_ids": text, "labels": text} for text in texts]
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
