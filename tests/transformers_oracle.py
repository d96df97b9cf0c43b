"""The slow oracle: transformers' own model and `generate`, one prompt at a time, greedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


class Oracle:
    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Exactly `max_tokens` tokens: end tokens do not end it."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=None,
                eos_token_id=None,
                pad_token_id=0,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        return output[0, len(prompt) :].tolist()

    def top_two_gap(self, tokens: Sequence[int]) -> tuple[int, float]:
        """Best next token behind `tokens`, and how far its logit is above the second best."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0, -1].float()
        best = logits.topk(2)
        return int(best.indices[0]), float(best.values[0] - best.values[1])
