"""A plain GPT-2 and its optimizer step, the yardstick for ours: what nanoGPT's model.py computes, in the same torch ops.

As there: one fused linear layer for queries, keys and values, ``scaled_dot_product_attention``, LayerNorm before each part, learned
positions, biases everywhere, AdamW with decay on matrices, the gradient clipped. As our ``gpt2`` body with table interface and
head: the tanh form of GELU (GPT-2's own) and an output table that is not the input table, so that both do the same arithmetic.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.bodies.gpt2 import GPT2Config
from models.settings import OptimSettings


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """ids [B, T], targets [B, T] -> mean loss in nats."""

    def __init__(self, config: GPT2Config, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, config.width), nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(PlainBlock(config.width, config.heads, config.ffn) for _ in range(config.layers))
        self.ln_f, self.lm_head = nn.LayerNorm(config.width), nn.Linear(config.width, vocab_size, bias=False)
        for table in (self.wte, self.wpe, self.lm_head):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


class PlainTrainee:
    """``step`` takes one optimizer step on ``ids`` [B, T + 1]."""

    def __init__(self, config: GPT2Config, vocab_size: int, ids: Tensor, optim: OptimSettings) -> None:
        self.ids, self.clip = ids, optim.clip
        self.model = PlainGPT2(config, vocab_size).to(ids.device)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))

    def step(self) -> None:
        loss = self.model(self.ids[:, :-1], self.ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
