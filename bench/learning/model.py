"""A small GPT whose parameters are views of a flat tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch.wire import BLOCK
from torch import nn
from torch.nn import functional

KEPT_BYTES = 64 << 10
"""Parameters of fewer bytes, or of fewer than two dimensions, stay bf16, as in BytePS."""
ALIGNMENT = 1024
"""Number of values to a multiple of which a flat tensor is padded: whole blocks, and equal chunks
per host."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model, and of a step."""

    vocabulary: int = 32768
    width: int = 256
    layers: int = 6
    sequence: int = 512
    hosts: int = 4
    batch: int = 16
    """Number of sequences per host."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens per step."""
        return self.hosts * self.batch * self.sequence


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.out, self.down):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _turned(qkv[0], turn), _turned(qkv[1], turn)
        mixed = functional.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary position embeddings to `x`."""
    first, second = x.float().chunk(2, -1)
    cos, sin = turn
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class GPT(nn.Module):
    """A GPT whose input and output embedding are the same parameter."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(size.width, size.layers) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        half = size.width // max(1, size.width // 64) // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(size.sequence)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it.

        Args:
            tokens: shape (batch, sequence + 1)
        """
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        scores = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


class FlatGPT:
    """GPT in bf16 whose parameters are views of `held`. Parameters that travel in few bits come
    first."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.model = GPT(size).to(device)
        parameters = list(self.model.parameters())
        small = [p for p in parameters if p.dim() < 2 or 2 * p.numel() < KEPT_BYTES]
        kept_ids = {id(p) for p in small}
        self.large, self.small = [p for p in parameters if id(p) not in kept_ids], small
        self.few = _aligned(sum(p.numel() for p in self.large))
        numel = self.few + _aligned(sum(p.numel() for p in small))
        self.held = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        for part, begin in ((self.large, 0), (self.small, self.few)):
            for parameter in part:
                view = self.held[begin : begin + parameter.numel()].view(parameter.shape)
                parameter.data = view
                begin += parameter.numel()

    def first_values(self, size: Size, seed: int) -> torch.Tensor:
        """Return initial parameters, flat, fp32, on the CPU. A seed gives the same ones on any
        machine."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = dict(GPT(size).named_parameters())
        values = torch.zeros(self.held.numel())
        names = {id(p): name for name, p in self.model.named_parameters()}
        for part, begin in ((self.large, 0), (self.small, self.few)):
            for parameter in part:
                end = begin + parameter.numel()
                values[begin:end] = fresh[names[id(parameter)]].detach().flatten()
                begin = end
        return values

    def shards(self, hosts: int) -> torch.Tensor:
        """Return the indices of `held` in the order in which FSDP2 gathers them.

        A layer's parameters are gathered together, and so are those outside of layers. Each host
        sends its rows of each parameter, one after the other. Its last block is filled up with
        padding of `held`.
        """
        model, indices = self.model, torch.arange(self.held.numel())
        begins = {p.data_ptr(): (p.data_ptr() - self.held.data_ptr()) // 2 for p in self.parameters}
        groups: list[list[torch.Tensor]] = [list(layer.parameters()) for layer in model.layers]
        groups.append([model.embedding.weight, model.norm.weight])
        parts = []
        for group in groups:
            for host in range(hosts):
                own = [
                    indices[begin : begin + p.numel()].chunk(hosts)[host]
                    for p in group
                    for begin in (begins[p.data_ptr()],)
                ]
                missing = -sum(map(len, own)) % BLOCK
                parts += [*own, torch.full((missing,), self.held.numel() - 1)]
        return torch.cat(parts).to(self.held.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.large, *self.small]


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
