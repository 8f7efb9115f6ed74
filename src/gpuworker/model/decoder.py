"""Layer 1. A decoder-only transformer, run as its description says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from gpuworker.kernels.activation import gated_activation
from gpuworker.kernels.attention import AttentionBackend, PagedAttention, write_kv
from gpuworker.kernels.batch import AttentionBatch, LayerKV
from gpuworker.kernels.experts import expert_mlp, route
from gpuworker.kernels.linear import Linear
from gpuworker.kernels.norm import RmsNorm
from gpuworker.kernels.rope import Rotation, apply_rope
from gpuworker.model.description import ModelDescription
from gpuworker.model.layers import Layer, Mlp, Moe, model_weights
from gpuworker.model.rope import RopeTable

__all__ = ["Decoder"]


class Decoder:
    """Computes hidden states and logits from parameters that it does not own.

    params maps the names of parameter_specs to tensors. Their contents may change between
    calls: nothing is derived from them ahead of a call. max_model_len bounds positions. Run it
    under torch.inference_mode; one object serves one thread.
    """

    def __init__(
        self,
        description: ModelDescription,
        params: Mapping[str, torch.Tensor],
        *,
        max_model_len: int,
        attention_backend: AttentionBackend,
    ) -> None:
        self.description = description
        weights = model_weights(description, params)
        self._embed, self._norm, self._lm_head = weights.embed, weights.norm, weights.lm_head
        self._layers = weights.layers
        device = self._embed.device
        self._ropes = tuple(RopeTable(spec, max_model_len, device) for spec in description.ropes)
        self._normed = RmsNorm(
            description.norm_eps, one_plus=description.norm_one_plus, device=device
        )
        self._linear = Linear(self._embed.dtype, device)
        self._backend = attention_backend

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Return the normed hidden states [T, hidden_size] of a step and fill its KV slots.

        input_ids and positions are int64 [T]; kv holds one cache per layer.
        """
        d = self.description
        hidden = F.embedding(input_ids, self._embed)
        if d.embedding_multiplier != 1.0:
            # Rounded to the type of the embedding, as it is stored in the reference models.
            hidden *= torch.tensor(d.embedding_multiplier, dtype=hidden.dtype)
        rotations = [rope.rotation(positions, batch, hidden.dtype) for rope in self._ropes]
        attention = PagedAttention(batch, self._backend)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = hidden if layer.input_norm is None else self._normed(hidden, layer.input_norm)
            x = self._attend(x, layer, layer_kv, batch, rotations, attention)
            if layer.attention_output_norm is not None:
                x = self._normed(x, layer.attention_output_norm)
            hidden.add_(x, alpha=d.residual_multiplier)
            x = hidden if layer.mlp_norm is None else self._normed(hidden, layer.mlp_norm)
            x = self._feed_forward(x, layer.mlp)
            if layer.mlp_output_norm is not None:
                x = self._normed(x, layer.mlp_output_norm)
            hidden.add_(x, alpha=d.residual_multiplier)
        return self._normed(hidden, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, vocab_size] of rows of forward's result."""
        d = self.description
        logits = self._linear(hidden, self._lm_head).float()
        if d.logits_divisor != 1.0:
            logits /= d.logits_divisor
        if d.logits_softcap is not None:
            logits = logits.div_(d.logits_softcap).tanh_().mul_(d.logits_softcap)
        return logits

    def _attend(
        self,
        x: torch.Tensor,
        layer: Layer,
        kv: LayerKV,
        batch: AttentionBatch,
        rotations: Sequence[Rotation],
        attention: PagedAttention,
    ) -> torch.Tensor:
        d = self.description
        num_q, num_kv = d.num_attention_heads, d.num_kv_heads
        qkv = self._linear(x, layer.qkv.weight, layer.qkv.bias)
        heads = qkv.contiguous().view(-1, num_q + 2 * num_kv, d.head_size)
        qk, v = heads.split_with_sizes((num_q + num_kv, num_kv), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._qk_normed(qk, layer.q_norm, layer.k_norm)
        if layer.spec.rope is not None:
            qk = apply_rope(qk, rotations[layer.spec.rope])
        q, k = qk.split_with_sizes((num_q, num_kv), dim=1)
        write_kv(kv, k, v, batch)
        out = attention.attend(
            q,
            kv,
            scale=d.attention_scale,
            sliding_window=layer.spec.sliding_window,
            softcap=d.attention_softcap,
        )
        return self._linear(out.flatten(1), layer.o.weight, layer.o.bias)

    def _qk_normed(
        self, qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
    ) -> torch.Tensor:
        num_q = self.description.num_attention_heads
        q, k = qk[:, :num_q], qk[:, num_q:]
        if self.description.qk_norm == "head":
            q, k = self._normed(q, q_weight), self._normed(k, k_weight)
        else:
            q = self._normed(q.flatten(1), q_weight).view(q.shape)
            k = self._normed(k.flatten(1), k_weight).view(k.shape)
        return torch.cat((q, k), dim=1)

    def _feed_forward(self, x: torch.Tensor, block: Mlp | Moe) -> torch.Tensor:
        activation = self.description.activation
        if isinstance(block, Mlp):
            gate_up = self._linear(x, block.gate_up.weight, block.gate_up.bias)
            inner = gated_activation(gate_up, activation)
            return self._linear(inner, block.down.weight, block.down.bias)
        spec = block.spec
        router_logits = self._linear(x, block.router)
        weights, experts = route(router_logits, spec.top_k, normalize=spec.normalize)
        out = expert_mlp(x, block.gate_up, block.down, weights, experts, activation, self._linear)
        if block.shared is not None and block.shared_gate is not None:
            gate = torch.sigmoid(self._linear(x, block.shared_gate))
            out = out.addcmul_(self._feed_forward(x, block.shared), gate)
        return out
