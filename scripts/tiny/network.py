"""The Qwen3 architecture for training on packed rows, with the parameter names of transformers.

A compact twin of `transformers.Qwen3ForCausalLM`: the saved weights load there unchanged, and the probes run there.
Does not know the corpus, the optimizer, or how to sample.
Letters: R rows, L positions, H query heads, K key/value heads, D head dimension, E hidden, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
"""config.json as it is written beside the weights."""

VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 192, 512, 4, 6, 2, 32
EPS, ROPE_THETA = 1e-6, 10000.0


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square normalisation over the last dimension, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


class Norm(nn.Module):
    """A learned scale on the normalised input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        return rms_norm(x, self.weight)


def rotate(x_RHLD: Tensor, cos_RLD: Tensor, sin_RLD: Tensor) -> Tensor:
    """Rotary position embedding, halves convention."""
    first, second = x_RHLD.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_RHLD * cos_RLD.unsqueeze(1) + rotated * sin_RLD.unsqueeze(1)


def rotary_tables(positions_RL: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [R, L, D] in fp32."""
    exponents = torch.arange(0, HEAD_DIM, 2, device=positions_RL.device).float() / HEAD_DIM
    angles = positions_RL.float().unsqueeze(-1) * ROPE_THETA**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm = Norm(HEAD_DIM)
        self.k_norm = Norm(HEAD_DIM)

    def forward(self, x_RLE: Tensor, rotary: tuple[Tensor, Tensor], visible_R1LL: Tensor) -> Tensor:
        """[R, L, E] to the same shape; a query sees the keys that `visible_R1LL` allows."""
        rows, length, _ = x_RLE.shape
        q = self.q_norm(self.q_proj(x_RLE).view(rows, length, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_RLE).view(rows, length, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x_RLE).view(rows, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        cos, sin = rotary
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_R1LL)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, HEADS * HEAD_DIM))


class FeedForward(nn.Module):
    """The gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R, L, E] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention, then MLP, each on a normalised input and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = FeedForward()
        self.input_layernorm = Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """[R, L, E] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Token embedding, layers and final norm: what transformers calls `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)


class Network(nn.Module):
    """Packed rows in, weighted loss out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = Stack()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 if "embed" in name else (0.3 if is_output else 1.0) / math.sqrt(parameter.shape[1])
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(
        self, ids_RL: Tensor, targets_RL: Tensor, weights_RL: Tensor, positions_RL: Tensor, document_RL: Tensor
    ) -> Tensor:
        """The mean cross-entropy, each position counted by its weight. Documents of a row never see each other."""
        length = ids_RL.shape[1]
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=ids_RL.device).tril()
        same_R1LL = (document_RL.unsqueeze(1) == document_RL.unsqueeze(2)).unsqueeze(1)
        visible = same_R1LL & causal_LL
        rotary = rotary_tables(positions_RL)
        x = self.model.embed_tokens(ids_RL)
        for layer in self.model.layers:
            x = layer(x, rotary, visible)
        logits_RLV = F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()
        losses = F.cross_entropy(logits_RLV.flatten(0, 1), targets_RL.flatten(), reduction="none")
        return (losses * weights_RL.flatten()).sum() / weights_RL.sum()
