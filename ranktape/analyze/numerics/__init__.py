"""The mathematics of low precision on arrays: formats, histograms, quantisers, sweeps, digests, differences."""
