"""Trains a small character-level transformer on a text, with torch's RMSNorm, with this package's, or with both.

    python examples/char_lm.py                               # trains with rmsnorm_raw on the README
    python examples/char_lm.py --norm both --csv losses.csv  # trains twice and compares the loss of every step

With `--norm both` the exit status is 1 if the two losses differ by more than 2e-3 at any step.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from rmsnorm_raw import fused_add_rmsnorm, rmsnorm

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 16
TOLERANCE = 2e-3  # on the loss: fp32 rounding moves it by about 1e-6, a missing term of dx by more than 0.1
README = Path(__file__).resolve().parent.parent / "README.md"


class AddNorm(nn.Module):
    """Adds x to the residual stream and normalises the sum: (x, residual) -> (y, residual + x)."""

    def __init__(self, norm, eps):
        super().__init__()
        self.norm, self.eps = norm, eps
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual=None):
        if self.norm == "torch":
            residual = x if residual is None else x + residual
            return F.rms_norm(residual, (WIDTH,), self.weight, self.eps), residual
        if residual is None:  # the first norm of the network: x itself starts the residual stream
            return rmsnorm(x, self.weight, self.eps), x
        return fused_add_rmsnorm(x, residual, self.weight, self.eps)


class Block(nn.Module):
    """Attention, then an MLP. What a block returns has not been added to the residual yet: the next norm does that."""

    def __init__(self, norm, eps):
        super().__init__()
        self.attention_norm, self.mlp_norm = AddNorm(norm, eps), AddNorm(norm, eps)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x, residual):
        y, residual = self.attention_norm(x, residual)
        # (batch, context, 3 * width) -> three tensors (batch, heads, context, width / heads)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, residual = self.mlp_norm(x, residual)
        return self.mlp(y), residual


class CharLM(nn.Module):
    def __init__(self, vocabulary, norm, eps):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(norm, eps) for _ in range(LAYERS))
        self.last_norm = AddNorm(norm, eps)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # so small that a wrong eps shows in the loss

    def forward(self, tokens):
        x, residual = self.characters(tokens) + self.positions.weight, None
        for block in self.blocks:
            x, residual = block(x, residual)
        y, _ = self.last_norm(x, residual)
        return self.head(y)


def train(text, norm, *, steps=50, seed=0, device="cpu", eps=1e-6):
    """Trains a new model on the text and yields the loss of each step, in nats per character."""
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text], device=device)
    torch.manual_seed(seed)  # the first weights are drawn on the CPU, in the same order for every norm and device
    model = CharLM(len(alphabet), norm, eps).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(seed)  # one of its own, so that nothing else can shift the batches
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=batches)
        windows = tokens[(starts + torch.arange(CONTEXT + 1)).to(device)]  # one longer: targets are inputs moved by one
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=["rmsnorm_raw", "torch", "both"], default="rmsnorm_raw")
    parser.add_argument("--text", type=Path, default=README, help="file to train on (default: the project's README.md)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="cuda also means ROCm")
    parser.add_argument("--csv", type=Path, help="write the losses to this file, one row per step")
    parser.add_argument("--eps", type=float, default=1e-6)
    parser.add_argument("--torch-eps", type=float, help="another eps for torch alone, to see the comparison fail")
    args = parser.parse_args()

    if args.steps < 1:
        parser.error(f"--steps is {args.steps}, at least 1 is needed")
    if not args.text.is_file():
        parser.error(f"{args.text} is not a file; give a text with --text")
    text = args.text.read_text(encoding="utf-8")
    if len(text) <= CONTEXT:
        parser.error(f"{args.text} has {len(text)} characters, at least {CONTEXT + 1} are needed")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    console = Console()
    console.print(f"{len(text)} characters of {args.text.name}, {args.steps} steps on {device}, seed {args.seed}")
    losses = {}
    for norm in ["torch", "rmsnorm_raw"] if args.norm == "both" else [args.norm]:
        eps = args.torch_eps if norm == "torch" and args.torch_eps is not None else args.eps
        losses[norm] = []
        began = time.perf_counter()
        with Progress(console=console) as progress:
            bar = progress.add_task(norm, total=args.steps)
            for loss in train(text, norm, steps=args.steps, seed=args.seed, device=device, eps=eps):
                losses[norm].append(loss)
                progress.update(bar, advance=1, description=f"{norm}: loss {loss:.4f}")
        seconds = time.perf_counter() - began  # on the first run this includes compiling rmsnorm_raw's kernels
        console.print(f"{norm}: {seconds:.1f} s")

    rows = list(zip(*losses.values(), strict=True))  # one tuple per step
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([["step", *losses], *([step, *row] for step, row in enumerate(rows))])
    table = Table("step", *losses, title="loss")
    for step, row in enumerate(rows):
        if step % 10 == 0 or step == len(rows) - 1:
            table.add_row(str(step), *(f"{loss:.6f}" for loss in row))
    console.print(table)

    if args.norm != "both":
        return 0
    differences = [abs(a - b) for a, b in rows]
    same = all(difference <= TOLERANCE for difference in differences)  # a loss of NaN is not the same either
    console.print(f"largest |Δloss| {max(differences):.2e}, {'within' if same else 'beyond'} {TOLERANCE}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
