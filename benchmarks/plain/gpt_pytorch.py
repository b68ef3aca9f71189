"""A small GPT in PyTorch by hand, as nanoGPT trains it: what hvdkit is measured against (`make bench`).

python benchmarks/plain/gpt_pytorch.py
horovodrun -np 2 python benchmarks/plain/gpt_pytorch.py --horovod
"""

from contextlib import nullcontext

import shared
import torch
from torch import nn
from torch.nn import functional as F

hvd = shared.horovod("horovod.torch")


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        width = args.width
        self.heads = args.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(n, t, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).contiguous().view(n, t, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.ln_f = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                share = (2 * args.layers) ** 0.5 if "proj" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / share)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def main():
    args = shared.text_options()
    hvd.init()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = GPT(args)
    named = dict(model.named_parameters())
    groups = [
        {"params": [each for each in named.values() if each.dim() >= 2], "weight_decay": shared.DECAY},
        {"params": [each for each in named.values() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=shared.RATE, betas=shared.BETAS)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named.items())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def step(tokens, following, rate):
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(torch.from_numpy(tokens))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), torch.from_numpy(following).reshape(-1))
        loss.backward()
        if args.horovod:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), shared.CLIP)
        with optimizer.skip_synchronize() if args.horovod else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    shared.train_text(args, hvd, step)


if __name__ == "__main__":
    main()
