"""The activations of a transformer, by formula: what PyTorch's autograd keeps of each operation.

With GELU, dropout and attention that is not fused, it is the s b h (34 + 5 a s / h) bytes per layer in 16 bit of
Korthikanti et al. (arXiv 2205.05198, equation 2); here also for fused attention, grouped keys,
gated feed-forward and the loss.
"""

from __future__ import annotations

import msgspec

from sentinel.toolkit.plan.recipe import Precision
from sentinel.toolkit.plan.subject import Point, Profile, Subject

_SOURCE = "arXiv 2205.05198, section 4.1, term by term for what is configured"


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a transformer that determine its memory."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    """Number of key heads; 0: as many as heads."""
    head_size: int = 0
    """Width of a head; 0: hidden / heads."""
    feed_forward: int = 0
    """Width of the feed-forward; 0: four times hidden, or 8/3 of it if gated."""
    gated: bool = False
    """Whether the feed-forward has three matrices (SwiGLU) instead of two."""
    elementary_gelu: bool = False
    """Whether GELU's tanh form is made of elementary operations (`gelu_new`), which keep three more tensors."""
    rms: bool = False
    """Whether norms are RMSNorm in elementary operations, as in Hugging Face's code, instead of a fused LayerNorm."""
    bias: bool = True
    dropout: bool = False
    fused_attention: bool = True
    """Whether attention is scaled_dot_product_attention, which never stores the s x s matrix."""
    on_cpu: bool = False
    """Whether it runs on a CPU: masks of dropout are as wide as what they mask, attention with dropout is not fused."""
    tied: bool = True
    """Whether the head's matrix is the embedding's."""
    positions: int = 0
    """Learned position embeddings; 0: none."""
    extra: int = 0
    """Other parameters: token types, a pooler, a dense head."""
    head_dense: bool = False
    """Whether there is a dense layer, GELU and norm before the head, as in BERT."""
    experts: int = 0
    """Feed-forwards of a mixture, those that are shared included; 0: one, which is no mixture."""
    experts_per_token: int = 1
    """Feed-forwards that each token goes through."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return (self.kv_heads or self.heads) * (self.head_size or self.hidden // self.heads)

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return self.feed_forward or (8 * self.hidden // 3 if self.gated else 4 * self.hidden)

    @property
    def layer_matrices(self) -> int:
        """Parameters of the linear layers of one block, without biases."""
        h, q, k, f = self.hidden, self.queries, self.keys, self.inner
        feed = (3 if self.gated else 2) * h * f
        return h * (q + 2 * k) + q * h + feed * max(1, self.experts) + h * self.experts

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        h, q, k, f = self.hidden, self.queries, self.keys, self.inner
        biases = q + 2 * k + h + (f + h) * max(1, self.experts) if self.bias else 0
        norms = 2 * h * (1 if self.rms else 2)
        return self.layer_matrices + biases + norms

    @property
    def active_share(self) -> float:
        """Share of the parameters that a token goes through: the others are of experts that it is not sent to."""
        idle = max(0, self.experts - self.experts_per_token)
        return 1 - self.layers * idle * (3 if self.gated else 2) * self.hidden * self.inner / self.parameters

    @property
    def rest(self) -> int:
        """Parameters outside the blocks: embeddings, head and final norm."""
        h, v = self.hidden, self.vocabulary
        return v * h * (1 if self.tied else 2) + self.positions * h + h * (1 if self.rms else 2) + self.extra

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.rest

    def adapters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters on all linear layers of the blocks (arXiv 2106.09685, section 4.1)."""
        h, q, k, f = self.hidden, self.queries, self.keys, self.inner
        feed = (3 if self.gated else 2) * (h + f) * max(1, self.experts)
        return self.layers * rank * ((h + q) + 2 * (h + k) + (q + h) + feed)

    def layer_bytes(self, sequence: int, e: int) -> float:
        """Return the bytes that one block saves for one sample, with `e` bytes per element."""
        h, q, k, f, s = self.hidden, self.queries, self.keys, self.inner, sequence
        wide = max(e, 4)
        norm = (wide + (e if e < 4 else 0)) * h + (e * h if e == 4 else 0) if self.rms else e * h
        chosen = self.experts_per_token
        inputs = e * h * (1 + chosen)  # of the query/key/value and of the first feed-forward matrix
        if self.experts:
            inputs += e * h * chosen  # what the experts give, which is weighted
        attention: float = e * (q + 2 * k) + e * q
        attention += self._scores(s, e)
        feed = e * f * (4 if self.gated else 5 if self.elementary_gelu else 2) * chosen
        masks = 2 * h * (e if self.on_cpu else 1) if self.dropout else 0
        return float(s * (2 * norm + inputs + attention + feed + masks))

    def _scores(self, sequence: int, e: int) -> float:
        """Return the bytes of attention scores of one token: the softmax's result, its mask and the product; if fused,
        only a sum of exponentials per head."""
        if self.on_cpu and self.dropout:
            return self.heads * sequence * 3.0 * e
        if self.fused_attention:
            return 4.0 * self.heads
        return self.heads * sequence * (2.0 * e + 1 if self.dropout else e)

    def _head_bytes(self, sequence: int, e: int) -> float:
        """Return the bytes of the logits and of what cross-entropy in float32 needs at the start of backward."""
        extra = 4 * e * self.hidden if self.head_dense else 0
        norm = 2 * e * self.hidden
        return float(sequence * (self.vocabulary * (12 if e == 4 else 14) + extra + norm + e * self.hidden))

    def _working(self, sequence: int, e: int) -> float:
        """Return the bytes of the activations' gradients that one block's backward holds at once."""
        widest = self.inner * (3 if self.gated else 2) * self.experts_per_token
        scores = 0 if self.fused_attention and not (self.on_cpu and self.dropout) else 2 * self.heads * sequence
        return float(sequence * e * (self.hidden * 2 + max(widest, self.queries * 3, scores)))

    def profile(self, sequence: int, e: int, *, checkpointed: bool, autocast: bool) -> Profile:
        """Return the profile of one sample, with `e` bytes per element. `autocast`: weights are copied to that type."""
        layer, head = self.layer_bytes(sequence, e), self._head_bytes(sequence, e)
        kept = e * self.hidden * sequence if checkpointed else layer
        saved = self.layers * kept
        # While logits exist, no gradient does; later the head's, the largest of all, does.
        first = (self.rest if self.tied else self.rest / 2) / self.parameters
        last = 1 - (self.layer_parameters + (0 if self.tied else self.rest / 2)) / self.parameters
        block = (layer if checkpointed else 0.0) + self._working(sequence, e)
        own = float(e * self.layer_matrices) if autocast else 0.0
        blocks = self.layers * own
        logits = float(e * self.vocabulary * self.hidden) if autocast else 0.0
        points = (
            Point(saved + head, 0.0, blocks + logits),
            Point(saved + block, first, own if checkpointed else blocks),
            Point(block, last, own),
            Point(0.0, 1.0),
        )
        formula = (
            f"{self.layers} layers x s x {kept / sequence / self.hidden:.3g} h"
            + (" + one layer again" if checkpointed else "")
            + f" + logits s x v x {12 if e == 4 else 14}, bytes a sample"
        )
        source = "arXiv 1604.06174: only the input of each layer is kept" if checkpointed else _SOURCE
        return Profile(points=points, formula=formula, source=source)

    def subject(self, name: str, sequence: int, precision: Precision) -> Subject:
        """Return the subject of a plan. `sequence` 0: no activations."""
        profiles: list[Profile | None] = [None, None]
        if sequence:
            e, autocast = precision.activation, precision.activation < precision.weight
            profiles = [
                self.profile(sequence, e, checkpointed=checkpointed, autocast=autocast)
                for checkpointed in (False, True)
            ]
        return Subject(
            name=name,
            parameters=self.parameters,
            trainable=self.parameters,
            unit=self.layer_parameters,
            rest=self.rest,
            largest=max(self.vocabulary, self.inner) * self.hidden,
            linear=self.layers * self.layer_matrices,
            largest_linear=self.hidden * max(self.inner, self.queries),
            tokens=sequence,
            active_share=self.active_share,
            plain=profiles[0],
            checkpointed=profiles[1],
        )
