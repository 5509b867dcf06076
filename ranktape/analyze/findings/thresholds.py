"""The thresholds from which a deviation is a finding, with the reasons.

The robust z of a value is 0.6745 (x - median) / MAD, that is (x - median) / (1.4826 MAD): Iglewicz and Hoaglin, "How to
Detect and Handle Outliers" (1993), who call values beyond 3.5 outliers. Sizes of tensors are compared as logarithms to
base 2, in binades: their natural spread is a factor, not a difference.
"""

from __future__ import annotations

ROBUST_Z = 3.5
"""The threshold of Iglewicz and Hoaglin (1993)."""

NORMAL_MAD = 1.4826
"""The ratio of a normal distribution's standard deviation to its MAD: 1 / 0.6745."""

MIN_MAD_BINADES = 0.25
"""The smallest spread that is assumed among peers. bf16 alone rounds to 1/256, and the data of two ranks differ by a
few percent, which is not to count as a hundred MADs."""

MAX_POOLED_MAD_BINADES = 1.0
"""The largest spread that is assumed among two ranks. A larger difference in most places is a fault in most places."""

RANK_BINADES = 2.0
"""The smallest distance of a rank from its peers: a factor of 4. Metrics of gradients differ by a factor of 2 in clean
runs of two ranks, since the largest value of a batch comes from one sample."""

GRADIENT_RANK_BINADES = 3.0
"""A factor of 8 for gradients, which come from different data on each rank: an expert gets 3 tokens on one rank and 40
on another. The median over the samples has to be this far too; between ranks of clean runs of nine models, it differs
by up to 2^2.1."""

GRADIENT_TAIL_BINADES = 10.0
"""A factor of 1,000 for gradients that one sample can dominate: in clean runs of nine models, the largest sample is up
to 2^9.4 above the others (queries, keys and values early in training; a rare text), and so is the weight's gradient."""

GRADIENT_SERIOUS_BINADES = 16.0
"""Above the largest change of any gradient in a clean run, 2^12.6 from one captured iteration to the next."""

SERIOUS_BINADES = 6.0
"""A factor of 64: more than data cause, and more than an 8-bit format with one scale for all ranks can lose."""

LAYER_BINADES = 4.0
"""A factor of 16 between a layer and the layers on both sides. In clean runs, the gradients of queries and keys differ
by a factor of up to 8 between neighbours."""

EDGE_LAYER_BINADES = 8.0
"""A factor of 256 for the first and the last layer, which have only one neighbour and naturally differ, as they are
next to the embeddings and the loss. For gradients, see `GRADIENT_TAIL_BINADES`."""

NUM_EDGE_NEIGHBOURS = 3
"""The largest number of layers that the first or the last layer is compared with."""

MIN_LAYERS = 3
"""Among fewer layers, no outlier can be identified."""

SAMPLE_BINADES = 4.0
"""A factor of 16 between a sample and the samples of all ranks, microbatches and iterations, and the others of its own
tensor. Activations of clean runs reach a factor of 2. For gradients, see `GRADIENT_TAIL_BINADES`."""

MIN_SAMPLES = 4
"""Among fewer samples, no outlier can be identified."""

CHANNEL_BINADES = 4.0
"""A factor of 16 between a channel and the others. Outlier features of large models are 20 to 100 times the rest:
Dettmers et al., "LLM.int8()" (2022)."""

MIN_CHANNELS = 8
"""Among fewer channels, no outlier can be identified."""

MIN_SILENT_ITERATIONS = 3
"""The number of iterations from which a rank or microbatch without any gradient is serious: fewer can be chance."""

LOST_RATIO = 0.01
"""The part of a gradient that is below the smallest normal number of its dtype. It is 0 in clean runs."""

LOST_RATIO_SERIOUS = 0.25
"""The lost part of a gradient from which its direction changes."""

ZERO_EXCESS = 0.5
"""The excess of a gradient's ratio of zeros over that of its peers. Dropout and ReLU affect all layers alike."""

FLUSHED_RATIO = 0.1
"""The part of a gradient that rounding made zero, or that an 8-bit format would make zero even with a scale for each
tensor, because the range is too wide."""

FLOOR_RATIO = 0.05
"""The part of the nonzero values close to the smallest one, from which small values were rounded to zero. If zeros have
other causes (masks, ReLU, tokens without a loss), only one or two values are."""

MIN_FLOOR_ELEMENTS = 4
"""The smallest number of such elements: one among twenty is already 5 %."""

COARSE_RATIO = 0.95
"""The part of the elements with at most 4 significant bits. In a tensor that went through an 8-bit format with
power-of-two scales, all elements are; among other bf16 numbers, one in 16 is."""

MIN_SATURATED_RATIO = 1e-3
"""The part of a tensor that equals the largest number of an 8-bit dtype without infinities. If the scale is chosen from
the largest value, a single element does."""

SAME_CAUSE_SITES = 3
"""The number of places from which equal deviations of the same ranks, first seen in one iteration, are one cause."""

MIN_ALIKE_RATIO = 0.5
"""The part of the comparable places with equal bits from which ranks are copies, if no placement is stored."""

MAX_ODD_RATIO = 0.25
"""The largest part of the ranks that can differ from an equal majority and count as wrong rather than as shards."""

CLEARLY_NEARER_BINADES = 1.0
"""How much nearer the healthy one of two ranks is to its own layers and iterations than the other."""

MAX_OUTLYING_CHANNELS = 0.05
"""If a larger part of the channels is large, they are not outliers."""

MIN_MAJORITY = 3
"""Among fewer ranks, no majority can show that one is wrong."""

MIN_COMPARABLE = 4
"""The number of sites that have to agree for weights of a kind without comparable sites to count as copies."""

MAX_MEASURED_COPIES = 8
"""The largest number of sites whose copies are read and compared element by element."""

MAX_SKIPPED_STEPS = 4
"""If the loss scale settles, the scaler skips fewer than one in this many iterations after the first clean one."""
