"""From which point on a deviation is a finding, and why there.

The robust z of a value is 0.6745 (x - median) / MAD, that is (x - median) / (1.4826 MAD): Iglewicz and Hoaglin, "How to
Detect and Handle Outliers" (1993), who call values beyond 3.5 outliers. Sizes of tensors are compared as logarithms to
base 2, in binades: their natural spread is a factor, not a difference.
"""

from __future__ import annotations

ROBUST_Z = 3.5
"""Iglewicz and Hoaglin (1993)."""

NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution over its MAD: 1 / 0.6745."""

MIN_MAD_BINADES = 0.25
"""Peers that agree more closely count as if they spread so much: bf16 itself rounds to 1/256, and data of two ranks
differ by some percent, which must not be a hundred MADs."""

MAX_POOLED_MAD_BINADES = 1.0
"""No spread among two ranks is taken to be larger: what differs by more in most places is a fault in most places."""

RANK_BINADES = 2.0
"""One rank is a factor of 4 from its peers, at the least. Metrics of gradients differ by 2 in clean runs of two ranks,
since the largest value of a batch is that of one sample."""

GRADIENT_RANK_BINADES = 3.0
"""A factor of 8 for gradients, of which ranks saw other data: an expert is sent 3 tokens on one and 40 on another. The
median over the samples has to be so far, too: in clean runs of nine models it differs by up to 2^2.1 between ranks."""

GRADIENT_TAIL_BINADES = 10.0
"""What the gradient of one sample decides, a factor of 1,000: in clean runs of nine models the largest is up to 2^9.4
above the others (queries, keys and values that begin to learn; a rare text), and with it the gradient of the weight."""

GRADIENT_SERIOUS_BINADES = 16.0
"""Beyond what any gradient of a clean run did by itself: 2^12.6, from one captured iteration to the next."""

SERIOUS_BINADES = 6.0
"""A factor of 64: beyond what data do, and more than an 8-bit format with one scale for all ranks gives away."""

LAYER_BINADES = 4.0
"""A layer is a factor of 16 from the layers on both sides. Neighbours in clean runs differ by up to 8 in gradients of
queries and keys."""

EDGE_LAYER_BINADES = 8.0
"""The first and the last layer have one neighbour alone, and are different by nature: embeddings, the loss. Gradients
see `GRADIENT_TAIL_BINADES`."""

NUM_EDGE_NEIGHBOURS = 3
"""Layers that an edge is compared with, at the most."""

MIN_LAYERS = 3
"""Of fewer layers none can be said to be the odd one."""

SAMPLE_BINADES = 4.0
"""A sample is a factor of 16 above the samples of all ranks, microbatches and iterations, and above the other ones of
its own tensor. Activations of clean runs reach 2; gradients see `GRADIENT_TAIL_BINADES`."""

MIN_SAMPLES = 4
"""Of fewer samples none can be said to be the odd one."""

CHANNEL_BINADES = 4.0
"""A channel is a factor of 16 above the others. Outlier features of large models are 20 to 100 times the rest:
Dettmers et al., "LLM.int8()" (2022)."""

MIN_CHANNELS = 8
"""Of fewer channels none can be said to be the odd one."""

MIN_SILENT_ITERATIONS = 3
"""A rank or a microbatch without any gradient in so many iterations, and all: in fewer it may be chance."""

LOST_RATIO = 0.01
"""A part of a gradient that is below the smallest normal number of its type: clean runs have none."""

LOST_RATIO_SERIOUS = 0.25
"""So much of it lost is no tail any more: the direction of the gradient changes."""

ZERO_EXCESS = 0.5
"""A gradient has so much more zeros than its peers: dropout and ReLU give all layers alike theirs."""

FLUSHED_RATIO = 0.1
"""A part of a gradient that rounding made zero, or that an 8-bit format would make zero even with a scale for each
tensor: the range is too wide."""

FLOOR_RATIO = 0.05
"""Of a tensor whose small values were rounded to zero, so many of the others are the smallest number there is: those
that were just large enough. Of one that is zero in places (masks, ReLU, tokens without a loss) one or two are."""

MIN_FLOOR_ELEMENTS = 4
"""So many elements at the least: among a few dozen, one is 5 %."""

COARSE_RATIO = 0.95
"""Of a tensor that went through an 8-bit format with power-of-two scales, all elements have 4 significant bits; of
other bf16 numbers one in 16 has."""

MIN_SATURATED_RATIO = 1e-3
"""A part of a tensor that is exactly the largest number of an 8-bit type without infinities: with a scale chosen from
the largest value, a single element is."""

SAME_CAUSE_SITES = 3
"""From so many places on, the same deviation of the same ranks that begins in the same iteration is one cause."""

MIN_ALIKE_RATIO = 0.5
"""In so many of the comparable places ranks have equal bits, for them to be copies of one another where no placement
says it."""

MAX_ODD_RATIO = 0.25
"""So many of the ranks at most differ from a majority that agrees, for them to be wrong rather than shards."""

CLEARLY_NEARER_BINADES = 1.0
"""Of two ranks the healthy one is nearer to its own layers and iterations than the other one by so much."""

MAX_OUTLYING_CHANNELS = 0.05
"""Where a larger part of the channels is large, being so is ordinary."""

MIN_MAJORITY = 3
"""Of fewer ranks no majority can be wrong about one."""

MIN_COMPARABLE = 4
"""So many sites that agree say that all weights of a run are copies, where a kind of site has no others."""

MAX_MEASURED_COPIES = 8
"""Sites whose copies are read and compared element by element."""

MAX_SKIPPED_STEPS = 4
"""Of the iterations after the first clean one a scaler skips less than one in so many, if its scale settles."""
